"""Runs in the worker process of vLLM: the wires by which weights arrive, and where they are staged."""
