"""What the two ends of a weight push agree on."""
