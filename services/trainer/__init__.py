"""Trainer service: the run API (no torch) and, per run, the training rank it supervises."""
