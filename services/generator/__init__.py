"""vLLM generation service: takes prompts, publishes whole groups of completions, and receives weights while it runs."""
