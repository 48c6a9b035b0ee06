"""Keeps what was sampled in a session as rows of exact token ids. Pure."""
