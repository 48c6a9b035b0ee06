"""What is kept of a run: checkpoints, exported models, uploads."""
