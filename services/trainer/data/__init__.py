"""Prompts: where rows come from, whose turn it is, and the token ids they become."""
