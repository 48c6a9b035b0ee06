"""Runs untrusted programs in isolation: they can compute for a limited time and do nothing else."""
