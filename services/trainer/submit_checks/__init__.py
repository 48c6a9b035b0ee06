"""Checks a submitted run before it is accepted: its model, data sets, rewards, tools, vLLM options and paths."""
