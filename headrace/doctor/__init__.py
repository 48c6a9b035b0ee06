"""`headrace doctor`."""
