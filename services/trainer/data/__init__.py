"""Prompts: reading rows, the order in which data sets take turns, and encoding as token ids."""
