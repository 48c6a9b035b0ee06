"""`headrace keys`: manages the named API keys in the file that the services read."""
