"""The reward functions that come with headrace, one per file. built_in_rewards.py lists them."""
