"""Sessions over HTTP, in OpenAI's and Anthropic's protocols. Each session has its own base URL and key."""
