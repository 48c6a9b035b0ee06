"""The first hour on GPUs: the GPU tests and benchmarks as a list of steps, and a report."""
