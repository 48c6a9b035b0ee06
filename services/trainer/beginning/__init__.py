"""Begins a run from a checkpoint or from weights: found and checked at submit, loaded by the training rank."""
