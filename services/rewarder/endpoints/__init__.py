"""Reward endpoints: external services, registered by URL under a name and called like a reward function."""
