"""Configures, starts and watches vLLM's engine, and samples from it."""
