"""The beginning of a run that takes over from a checkpoint: found and checked at submit, loaded by the training rank."""
