"""The wire formats of reward endpoints: how requests are written, and how answers are read."""
