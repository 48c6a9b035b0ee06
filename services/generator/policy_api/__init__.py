"""The public routes that sample from the live policy."""
