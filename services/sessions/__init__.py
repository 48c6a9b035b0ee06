"""The sessions service: plays rollouts of several turns, with tools."""
