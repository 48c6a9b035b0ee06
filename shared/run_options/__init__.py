"""The options of a run by subject, each with the checks that concern it alone; run_config.py puts them together."""
