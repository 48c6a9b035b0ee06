"""A module that fails while it is imported."""

TABLE = {"known": 1}
SCALE = TABLE["unknown"]
