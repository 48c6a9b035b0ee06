"""Measures the cost of the reward service, and that it loses no score: concurrency, math-verify, hostile answers, a
run.
"""
