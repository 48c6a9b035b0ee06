"""Entry point of the sessions service: ``python -m services.sessions``. Settings come from ``HEADRACE_*`` variables."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import cast

EXIT_STOPPED, EXIT_CRASHED, EXIT_USER_ERROR = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM. Return the exit code: 0 stopped on request, 1 crashed (restart it), 2 a setting is wrong."""
    argparse.ArgumentParser(
        prog="python -m services.sessions",
        description="Plays the rollouts of runs with tools. Settings: HEADRACE_REDIS_URL, HEADRACE_HOST, "
        "HEADRACE_PORT, HEADRACE_API_KEY, HEADRACE_INTERNAL_KEY, HEADRACE_TOOL_PATH, HEADRACE_NUM_TOOL_WORKERS, ...",
    ).parse_args(arguments)

    from services.sessions.settings import SessionsSettings
    from shared.errors import HeadraceError, UserError
    from shared.service.child_secrets import close_to_others, hide_secrets
    from shared.service.logs import configure_first_logging, configure_logging, log_lines
    from shared.service.variable_names import warn_of_unknown_variables
    from shared.settings import from_environment

    log = logging.getLogger("services.sessions")
    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ)
    try:
        settings = from_environment(SessionsSettings)
    except UserError as error:
        log_lines(log, error)
        return EXIT_USER_ERROR
    hide_secrets(os.environ)
    close_to_others()  # before the first worker starts
    configure_logging(settings.log_level, log_format=settings.log_format)

    from services.sessions.service import SessionsService

    async def serve() -> None:
        await SessionsService(settings).run()

    try:
        asyncio.run(serve())
    except (HeadraceError, ExceptionGroup) as error:
        cause = _first(error)
        if not isinstance(cause, HeadraceError):
            raise
        log.critical("%s", cause)
        return EXIT_USER_ERROR if isinstance(cause, UserError) else EXIT_CRASHED
    return EXIT_STOPPED


def _first(error: BaseException) -> BaseException:
    """Return the first exception in a possibly nested group."""
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
    return cause


if __name__ == "__main__":
    sys.exit(main())
