"""The release of headrace, also where files are only copied and nothing is installed."""

VERSION = "0.1.0"
"""As in pyproject.toml; a test compares them."""
