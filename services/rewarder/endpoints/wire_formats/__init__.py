"""The formats in which reward endpoints are asked and answer."""
