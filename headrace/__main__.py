"""The `headrace` command."""

import sys

from headrace.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
