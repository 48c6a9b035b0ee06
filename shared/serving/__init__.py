"""The HTTP server of every service. It limits the time and memory a client can use before its key is checked."""
