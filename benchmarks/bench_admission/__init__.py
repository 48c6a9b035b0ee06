"""Measures what `admission: just_in_time` and `eager` do to staleness, throughput and learning."""
