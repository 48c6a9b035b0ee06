"""Observability of a run: metrics, log files, warnings, traces, and reports to trackers such as wandb."""
