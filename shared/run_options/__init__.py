"""The options of a run by subject, each module with the checks of its own options; run_config.py combines them."""
