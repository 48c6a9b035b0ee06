"""Weights in the worker process: the wires they come by, and where they are staged."""
