"""Redis: connections, keys, streams, and the runs kept there."""
