"""The training loop of rank 0: batches, optimizer steps, pushes, checkpoints, reports."""
