"""Users' tools and environments, which run in killable worker processes."""
