"""Runs functions that users wrote, in worker processes that are killed when a deadline passes."""
