"""Reward endpoints: URLs of other people's services, registered under a name and called like a reward function."""
