"""A run that begins from a checkpoint, which is found and checked at submit, and loaded by the training rank."""
