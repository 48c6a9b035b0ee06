"""Everything that knows vLLM."""
