"""Sessions over HTTP: OpenAI's chat completions, each session with its own base URL and key."""
