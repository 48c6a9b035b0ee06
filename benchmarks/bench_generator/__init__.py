"""Measures tokens per second of the whole service against bare vLLM."""
