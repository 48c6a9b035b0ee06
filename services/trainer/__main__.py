"""The trainer service: ``python -m services.trainer``.

    read settings --> connect to Redis --> serve run API and metrics, supervise training ranks

Exit status: 0 stopped on request; 1 failed, restart it; 2 fix the settings or the machine first, as the message says.
"""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the service until it is asked to stop or fails, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer",
        description="Serves the run API and supervises training ranks. Settings are HEADRACE_* environment variables, "
        "such as HEADRACE_REDIS_URL, HEADRACE_PORT, HEADRACE_API_KEY, HEADRACE_RUNS_DIR and HEADRACE_REWARDER_URL.",
    )
    parser.parse_args(arguments)
    # Imported late, so that --help does not load the service's dependencies.
    from services.trainer.run_api.service import run_service

    return run_service()


if __name__ == "__main__":
    sys.exit(main())
