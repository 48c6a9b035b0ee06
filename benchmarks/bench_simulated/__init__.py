"""Measures how group rate, Redis memory and Redis CPU grow with the number of simulated generator replicas."""
