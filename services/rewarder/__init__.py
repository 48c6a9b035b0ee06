"""The reward service: runs all reward functions of a run concurrently and publishes scored groups."""
