"""The launcher with a simulated generator instead of each real one: ``python simulated_launcher.py STATE_DIR``."""

import sys
from pathlib import Path

from headrace.local import launcher
from headrace.local.service_specs import UpSettings, default_commands
from headrace.terminal import say


def main() -> int:
    commands = default_commands() | {"generator": (sys.executable, "-m", "services.generator.simulated")}
    return launcher.run(UpSettings(state_dir=Path(sys.argv[1]), commands=commands), say=say)


if __name__ == "__main__":
    sys.exit(main())
