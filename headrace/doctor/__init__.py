"""`headrace doctor`: examines a deployment from the outside, and reports problems with their remedies."""
