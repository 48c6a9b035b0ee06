"""The reward functions that come with headrace, one per file, and helpers. built_in_rewards.py lists the functions."""
