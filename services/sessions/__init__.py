"""The sessions service: runs rollouts of several turns, with tools, environments or agent programs."""
