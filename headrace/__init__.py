"""The user-facing parts: command line, HTTP client, local launcher."""
