"""Code that every service process needs: logs, secrets, TLS, exits, and detection of hung or stopped processes."""
