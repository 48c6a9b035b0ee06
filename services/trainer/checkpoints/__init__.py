"""Writes, checks and finds the checkpoints of a run, and chooses the best one."""
