"""The reward functions that come with headrace, one a file; built_in_rewards.py has the table of them."""
