"""A run that begins from a checkpoint: the checkpoint is found and checked at submit, and loaded by the training rank."""
