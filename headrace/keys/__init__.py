"""`headrace keys`: named keys in the file that services read them from."""
