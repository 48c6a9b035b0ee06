"""The training loop of rank 0: admission, staleness, batches, the ledger, evaluation."""
