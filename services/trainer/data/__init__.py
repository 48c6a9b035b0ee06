"""Reads the rows of data sets, decides in which order they are used, and encodes prompts as token ids."""
