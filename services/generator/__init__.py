"""vLLM generation service: prompts in, whole groups of completions out, weights received in flight."""
