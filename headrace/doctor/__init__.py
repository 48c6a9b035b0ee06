"""`headrace doctor`: examines a deployment from outside, and says what is wrong and what to do."""
