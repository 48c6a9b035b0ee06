"""Prompt groups as the trainer counts them: ids, ledger, schedule, staleness."""
