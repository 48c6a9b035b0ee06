"""What runs inside a sandbox, as text handed to its Python: the standard library alone, Python 3.10 or newer."""
