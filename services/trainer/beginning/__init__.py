"""Begins a run from a checkpoint or weights, which are checked at submit and loaded by the training rank."""
