"""The HTTP server of every service: what a client may take of its time and memory, before anybody asks for a key."""
