"""What runs that wait for their turn take from the one that trains."""
