"""Reward models: sequence classifiers of Hugging Face, each in a process of its own."""
