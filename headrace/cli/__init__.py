"""The `headrace` command line: its argument parsers, and a module for each command or group of commands."""
