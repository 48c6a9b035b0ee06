"""The services as processes of this machine: `headrace up`."""
