"""The options of a run: a module for each subject, with the checks of its options. run_config.py combines them."""
