"""Measures what staleness costs and gains, with and without correction: the demo task with several bounds."""
