"""A run's optimizer, chosen by ``optim`` (transformers' names, and torch's Muon), and its learning-rate schedule."""
