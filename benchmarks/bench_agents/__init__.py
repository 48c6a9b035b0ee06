"""Measures turns of agents through the sessions service against the same turns straight at vLLM."""
