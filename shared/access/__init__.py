"""Who may ask a service for what, and what is written down about it: keys, scopes, the access log."""
