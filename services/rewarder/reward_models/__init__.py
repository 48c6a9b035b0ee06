"""Reward models: Hugging Face sequence classifiers, each in its own process."""
