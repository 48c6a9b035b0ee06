"""The tools and environments of runs: users' Python code in worker processes, MCP servers and OpenEnv servers."""
