"""Runs the launcher with stand-ins for the services, and the real embedded Redis: STATE_DIR DIRECTORY GENERATORS."""

import sys
from pathlib import Path

from headrace import launcher
from headrace.cli_up import say
from headrace.service_specs import UpSettings
from shared.errors import HeadraceError

STANDIN = Path(__file__).with_name("standin_service.py")


def main() -> int:
    state_dir, directory, num_generators = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    commands = {name: (sys.executable, str(STANDIN), name, directory) for name in ("trainer", "rewarder", "generator")}
    try:
        return launcher.run(UpSettings(state_dir=state_dir, num_generators=num_generators, commands=commands), say=say)
    except HeadraceError as error:
        say(f"headrace: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
