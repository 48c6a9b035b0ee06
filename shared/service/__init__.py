"""What every service process needs: logs, secrets, TLS, health."""
