"""Keeps account of prompt groups, without I/O: ids, outcomes, batches, and bounds on the number in flight."""
