"""Optimizers by the names that transformers has, Muon among them."""
