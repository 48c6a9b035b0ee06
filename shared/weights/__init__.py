"""Both ends of a weight push use this: chunks, checksums, deltas, weight files, the NCCL group."""
