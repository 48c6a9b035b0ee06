"""The objective: advantages, losses, off-policy corrections. Pure functions."""
