"""Observability of a run: metrics, rollout log, reports to trackers."""
