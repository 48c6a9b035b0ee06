"""Several training ranks that the training loop drives as one: rank 0 leads, the others execute its commands."""
