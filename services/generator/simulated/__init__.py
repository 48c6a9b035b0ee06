"""Simulated generator replicas, as docs/generator-contract.md requires, with random tokens instead of a model."""
