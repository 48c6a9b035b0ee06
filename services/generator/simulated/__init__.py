"""Simulated generator replicas: random tokens instead of a model, by the contract in docs/generator-contract.md."""
