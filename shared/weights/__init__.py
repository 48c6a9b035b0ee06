"""Code that both ends of a weight push use: chunks, checksums, deltas, weight files, the NCCL group."""
