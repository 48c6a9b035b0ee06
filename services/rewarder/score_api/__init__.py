"""The HTTP routes of the rewarder."""
