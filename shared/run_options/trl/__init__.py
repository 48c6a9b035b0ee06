"""Translates TRL's options into the settings of a run: run_config_of_trl.py, with a module for each subject."""
