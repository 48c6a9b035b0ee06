"""The HTTP server of every service: bounds the time and memory that a client can use before its key is checked."""
