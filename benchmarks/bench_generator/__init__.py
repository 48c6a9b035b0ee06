"""Tokens a second through the whole service, beside bare vLLM."""
