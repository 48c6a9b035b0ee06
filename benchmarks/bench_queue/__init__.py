"""Measures how much queued runs slow down the run in training."""
