"""Code that runs inside a sandbox, sent there as text. It needs only the standard library of Python 3.10 or newer."""
