"""The commands of `headrace`."""
