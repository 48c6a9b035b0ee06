"""Measurements that take minutes. They are not tests. Run each with ``python -m benchmarks.NAME``."""
