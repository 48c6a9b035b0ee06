"""Samples single turns of conversations for the sessions service."""
