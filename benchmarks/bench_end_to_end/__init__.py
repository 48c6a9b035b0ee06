"""Compares whole GRPO runs of headrace with TRL's, and headrace with itself at several staleness bounds."""
