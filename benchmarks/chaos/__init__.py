"""Faults at random over the whole stack, judged by what a run leaves behind; `python -m benchmarks.chaos`."""
