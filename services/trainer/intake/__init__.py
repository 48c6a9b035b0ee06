"""The intake of the training loop: admission, scored groups, the choice of batches, evaluation, pauses."""
