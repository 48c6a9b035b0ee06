"""Records the turns that were sampled in a session, and makes token sequences for training (rows) from them. Pure."""
