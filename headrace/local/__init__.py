"""Runs Redis and all services as processes of this machine, for `headrace up`."""
