"""Runs the launcher with stand-ins for some services, and the real embedded Redis.

python run_launcher.py STATE_DIR DIRECTORY NUM_GENERATORS STAND_IN...
"""

import logging
import os
import sys
from pathlib import Path

from headrace.local import hang_watch, launcher
from headrace.local.service_specs import UpSettings, default_commands
from headrace.terminal import say
from shared.errors import HeadraceError

STANDIN = Path(__file__).with_name("standin_service.py")


def main() -> int:
    state_dir, directory, num_generators, *stand_ins = sys.argv[1:]
    if "SILENT_S" in os.environ:
        hang_watch.SILENT_S = float(os.environ["SILENT_S"])
        hang_watch.FIRST_REACTION_S = 4 * hang_watch.SILENT_S
    logging.getLogger().addHandler(logging.NullHandler())
    commands = default_commands()
    commands |= {name: (sys.executable, str(STANDIN), name, directory) for name in stand_ins}
    settings = UpSettings(
        state_dir=Path(state_dir),
        num_generators=int(num_generators),
        repairs_redis="HEADRACE_TEST_REPAIRS_REDIS" in os.environ,
        commands=commands,
    )
    try:
        return launcher.run(settings, say=say)
    except HeadraceError as error:
        say(f"headrace: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
