"""The rewarder's HTTP API: lists, checks and calls reward functions, and registers reward endpoints."""
