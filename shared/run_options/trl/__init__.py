"""Runs with the options of TRL: run_config_of_trl.py translates them, with a module for each subject."""
