"""The sending half of the weight push."""
