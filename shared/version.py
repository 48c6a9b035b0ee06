"""The release of headrace, where nothing is installed but copied files too."""

VERSION = "0.1.0"
"""As in pyproject.toml; a test compares them."""
