"""Measures a weight push against a bare broadcast of the same bytes."""
