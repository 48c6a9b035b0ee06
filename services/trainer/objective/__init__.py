"""What is minimised: advantages, losses, corrections. Pure."""
