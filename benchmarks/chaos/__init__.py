"""Injects random faults into the whole stack, and judges what a run leaves behind; `python -m benchmarks.chaos`."""
