"""Checks that every loss type learns the demo task."""
