"""Reward service: runs every reward function of a run concurrently and publishes scored groups."""
