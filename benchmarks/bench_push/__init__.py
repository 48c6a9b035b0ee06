"""What a weight push takes beside a bare broadcast of the same bytes."""
