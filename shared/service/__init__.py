"""Code that every service process needs: logs, secrets, TLS, and detection of hung or stopped processes."""
