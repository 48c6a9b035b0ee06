"""Access to Redis: connections, key names, streams, and the records of runs."""
