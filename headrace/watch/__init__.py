"""Follows a run in the terminal."""
