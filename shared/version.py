"""The release number of headrace. An image that only copies the files has it too, without package metadata."""

VERSION = "0.1.0"
"""As in pyproject.toml; a test compares them."""
