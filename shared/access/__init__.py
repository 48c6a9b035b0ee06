"""Keys, scopes, routes and the access log: authorizes and records every request to a service."""
