"""Entry point of the rewarder: ``python -m services.rewarder``. Settings come from ``HEADRACE_*`` variables."""

import argparse
import asyncio
import logging
from collections.abc import Sequence

from shared.service.exiting import exit_at_once, run_and_exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rewarder until SIGTERM.

    Return the exit code: 0 if stopped on request, 1 after a crash (restart it), 2 if a setting cannot be used.
    """
    argparse.ArgumentParser(
        prog="python -m services.rewarder",
        description="Scores completed groups with the reward functions of their run. Settings: HEADRACE_REDIS_URL, "
        "HEADRACE_HOST, HEADRACE_PORT, HEADRACE_API_KEY, HEADRACE_REWARD_PATH, HEADRACE_NUM_REWARD_WORKERS, ...",
    ).parse_args(arguments)

    from services.rewarder.settings import RewarderSettings
    from shared.errors import HeadraceError
    from shared.service_process import EXIT_CRASHED, EXIT_STOPPED, EXIT_USER_ERROR, exit_code_of, settings_of_process

    log = logging.getLogger("services.rewarder")
    settings = settings_of_process(RewarderSettings)
    if settings is None:
        return EXIT_USER_ERROR

    from services.rewarder.service import RewarderService

    async def serve() -> int:
        service = RewarderService(settings)
        exit_code = EXIT_CRASHED
        try:
            await service.run()
            exit_code = EXIT_STOPPED
        except (HeadraceError, ExceptionGroup) as error:
            exit_code = exit_code_of(error)
        finally:
            if not await service.let_go():
                log.warning("an async reward function did not end although it was cancelled; exiting without it")
                exit_at_once(exit_code)
        return exit_code

    return asyncio.run(serve())


if __name__ == "__main__":
    run_and_exit(main)
