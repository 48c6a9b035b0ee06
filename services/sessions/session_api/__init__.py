"""The HTTP API of sessions: clients ask the policy for turns in OpenAI's and Anthropic's protocols."""
