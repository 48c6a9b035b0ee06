"""The lasting output of a run: checkpoints, exported models, uploads."""
