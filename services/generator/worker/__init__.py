"""Runs in vLLM's worker processes: receives pushed weights, stages them, and loads them into the model."""
