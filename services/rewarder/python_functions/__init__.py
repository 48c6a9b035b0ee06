"""Reward functions written in Python: their modules, and the workers that run them."""
