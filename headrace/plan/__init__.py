"""`headrace plan`."""
