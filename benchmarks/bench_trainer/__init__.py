"""Ours and TRL's trainer side by side: throughput and peak memory."""
