"""Sends HTTP requests to reward endpoints: address rules, connections, retries, secrets and signatures."""
