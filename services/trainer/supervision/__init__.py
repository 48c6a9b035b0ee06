"""Starts and restarts training ranks, on this machine and on other nodes."""
