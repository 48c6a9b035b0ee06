"""Measurements that take minutes; none of them is a test. Each is run as ``python -m benchmarks.NAME``."""
