"""Code that runs inside a sandbox. Its Python (3.10 or newer) gets it as text, with only the standard library."""
