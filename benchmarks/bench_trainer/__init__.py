"""Compares our trainer with TRL's: throughput and peak memory."""
