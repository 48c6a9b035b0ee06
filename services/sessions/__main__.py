"""Entry point of the sessions service: ``python -m services.sessions``. Settings come from ``HEADRACE_*`` variables."""

import argparse
import asyncio
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sessions service until SIGTERM, and return the process's exit code.

    0 means stopped on request, 1 crashed (restart it), and 2 that the user must correct something, such as a setting.
    """
    argparse.ArgumentParser(
        prog="python -m services.sessions",
        description="Plays the rollouts of runs with tools. Settings: HEADRACE_REDIS_URL, HEADRACE_HOST, "
        "HEADRACE_PORT, HEADRACE_API_KEY, HEADRACE_INTERNAL_KEY, HEADRACE_TOOL_PATH, HEADRACE_NUM_TOOL_WORKERS, ...",
    ).parse_args(arguments)

    from services.sessions.settings import SessionsSettings
    from shared.errors import HeadraceError
    from shared.service_process import EXIT_STOPPED, EXIT_USER_ERROR, exit_code_of, settings_of_process

    settings = settings_of_process(SessionsSettings)
    if settings is None:
        return EXIT_USER_ERROR

    from services.sessions.service import SessionsService

    async def serve() -> None:
        await SessionsService(settings).run()

    try:
        asyncio.run(serve())
    except (HeadraceError, ExceptionGroup) as error:
        return exit_code_of(error)
    return EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
