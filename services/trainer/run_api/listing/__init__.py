"""Lists runs: filtered, sorted, a page at a time."""
