"""The mathematics of the training objective: advantages, losses and off-policy corrections. No I/O."""
