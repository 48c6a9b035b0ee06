"""Shows runs in the terminal: live, as curves, or from their directories."""
