"""Runs programs that nobody has read, so that all they can do is compute for a while."""
