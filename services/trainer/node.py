"""Starts the training ranks of a further machine for each run in turn: ``python -m services.trainer.node``.

    run API --current run, its number of machines--> this process --starts rank_launcher--> ranks of this machine
                                                                  --SIGTERM, once the run is over-->

It serves machines that are started before a run exists, such as Kubernetes pods. Node 0 is the run API's own machine.
While the run is not over, a launcher that ended is started again. While the run API is away, running ranks go on.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.trainer.first_of import first_of
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import ranks_per_node
from services.trainer.supervision.rank_process import RankProcess
from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.service.child_secrets import hide_secrets
from shared.service.logs import configure_first_logging, configure_logging, log_lines
from shared.service.tls import PeerTls, trouble_with
from shared.service.variable_names import warn_of_unknown_variables
from shared.settings import from_environment

log = logging.getLogger("services.trainer.node")

STOPPED, KEY_REFUSED, REFUSED = 0, 1, 2
LAUNCHER = (sys.executable, "-m", "services.trainer.supervision.rank_launcher")
_POLL_S = 2.0
_PAUSE_S = 10.0
"""Pause after a launcher has ended: its run may be over before the run API reports it."""
_HTTP_TIMEOUT_S = 10.0
_SERVED = ("running", "paused")


@dataclass(frozen=True)
class Wanted:
    """A run that needs ranks on this machine."""

    run_id: str
    run_dir: Path
    config: RunConfig


class RunApiAwayError(Exception):
    """The run API cannot be reached, or answered with an HTTP error or something other than JSON."""

    status: int | None = None
    """The answer's HTTP status if that was an error; otherwise None."""


async def wanted_run(api: httpx.AsyncClient, *, node_rank: int) -> Wanted | None:
    """Return the run that is trained now or paused; None without one, or if it has no ranks on this machine.

    Raises:
        RunApiAwayError: The run API does not answer, or answers with an HTTP error or something other than JSON.
        UserError: The run's settings cannot be parsed, for example because they belong to another release.
    """
    wanted: dict[str, Any] = {"status": _SERVED, "limit": 1}
    listed = await _get(api, "/v1/runs", wanted)
    while not listed["runs"]:  # a page may be empty although more follow
        if listed["next_cursor"] is None:
            return None
        listed = await _get(api, "/v1/runs", {**wanted, "cursor": listed["next_cursor"]})
    current = listed["runs"][0]
    detail = await _get(api, f"/v1/runs/{current['run_id']}")
    config = parse_run_config(detail["config"])
    if node_rank >= config.nnodes:
        return None
    return Wanted(run_id=detail["run_id"], run_dir=Path(detail["run_dir"]), config=config)


async def _get(api: httpx.AsyncClient, path: str, params: Mapping[str, Any] | None = None) -> Any:
    try:
        answer = await api.get(path, params=params)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        why = trouble_with(error, host=api.base_url.host) or repr(error)
        away = RunApiAwayError(f"the run API at {api.base_url} does not answer GET {path}: {why}")
        away.status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        raise away from error


class NodeFollower:
    """Polls the run API for its current run, and starts and stops this machine's training ranks for it.

    Args:
        settings: The trainer's settings; ``rendezvous_endpoint`` must be set.
        api: Client of the run API.
        node_rank: Number of this machine, 1 or more.
        heartbeat: File to touch in every iteration of the loop; None for no file.
        launcher: Command that starts the ranks.
        poll_s: Pause between two requests to the run API, in seconds.
        pause_s: Pause after a launcher has ended, in seconds.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        api: httpx.AsyncClient,
        *,
        node_rank: int,
        heartbeat: Path | None = None,
        launcher: Sequence[str] = LAUNCHER,
        poll_s: float = _POLL_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._settings = settings
        self._api = api
        self._node_rank = node_rank
        self._heartbeat = heartbeat
        self._launcher = launcher
        self._poll_s = poll_s
        self._pause_s = pause_s

    async def follow(self, stopping: asyncio.Event) -> None:
        """Serve runs until ``stopping`` is set. Then ask the ranks to end, and kill them after their grace period.

        Raises:
            RunApiAwayError: The run API refuses the key while no ranks run here.
        """
        while not stopping.is_set():
            self._beat()
            wanted = await self._wanted()
            if wanted is None:
                await first_of(stopping.wait(), timeout_s=self._poll_s)
            else:
                await self._serve(wanted, stopping)

    async def _serve(self, wanted: Wanted, stopping: asyncio.Event) -> None:
        output = wanted.run_dir / f"node-{self._node_rank}.log"
        try:
            ranks = await RankProcess.start(
                self._command(wanted),
                log=output,
                environment=self._settings.rank_environment(),
                cpus=self._settings.rank_cpus,
            )
        except (UserError, OSError) as error:
            log.error("run %s: node %d cannot start its ranks: %s", wanted.run_id, self._node_rank, error)  # noqa: TRY400
            await self._rest(stopping)
            return
        log.info("run %s: node %d has started its ranks, log %s", wanted.run_id, self._node_rank, output)
        try:
            while not stopping.is_set() and not ranks.has_ended and await self._is_still_wanted(wanted):
                self._beat()
                await first_of(ranks.wait(), stopping.wait(), timeout_s=self._poll_s)
            has_ended = ranks.has_ended
            status = await ranks.stop(grace_s=self._settings.rank_stop_grace_s)
        finally:
            ranks.kill()
        log.info("run %s: the ranks of node %d ended with status %d", wanted.run_id, self._node_rank, status)
        if has_ended:
            await self._rest(stopping)

    async def _wanted(self) -> Wanted | None:
        try:
            return await wanted_run(self._api, node_rank=self._node_rank)
        except RunApiAwayError as error:
            if error.status == 401:
                raise
            log.warning("%s", error)
        except UserError as error:
            log.error("the current run cannot be served: %s", error)  # noqa: TRY400
        return None

    async def _is_still_wanted(self, wanted: Wanted) -> bool:
        try:
            # Requests only this run: for a list, the run API would read all runs ever made, for every node, at every
            # poll.
            detail = await _get(self._api, f"/v1/runs/{wanted.run_id}")
        except RunApiAwayError as error:
            log.warning("%s", error)
            return error.status != 404
        return detail["status"] in _SERVED

    def _command(self, wanted: Wanted) -> list[str]:
        settings = self._settings
        return [
            *self._launcher,
            *("--nproc-per-node", str(ranks_per_node(wanted.config, settings.rank_environment()))),
            *("--nnodes", str(wanted.config.nnodes)),
            *("--node-rank", str(self._node_rank)),
            *("--endpoint", settings.rendezvous_endpoint),
            wanted.run_id,
            "--",
            *settings.rank_command,
        ]

    async def _rest(self, stopping: asyncio.Event) -> None:
        """Wait ``pause_s`` seconds, or until ``stopping`` is set, and touch the heartbeat file meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._pause_s
        while loop.time() < until and not stopping.is_set():
            self._beat()
            await first_of(stopping.wait(), timeout_s=min(self._poll_s, self._pause_s))

    def _beat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.touch()


def node_number(name: str) -> int:
    """Return the number of a machine, given as ``2`` or at the end of a name such as ``headrace-trainer-node-2``.

    Raises:
        ArgumentTypeError: The name does not end with a number above 0.
    """
    number = name.rpartition("-")[2]
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{name!r} does not end with a number above 0; 0 is the run API's machine")
    return int(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow runs until SIGTERM. Return the exit status: 0 after a stop, 1 for a refused key, 2 for wrong settings.

    The API key is read only at the start. After a key rotation, a supervisor has to start this process again.
    """
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.node",
        description="Starts the training ranks of a further machine for every run with enough nnodes. Reads the "
        "trainer's HEADRACE_* variables: HEADRACE_RENDEZVOUS_ENDPOINT must be set, Redis is not needed.",
    )
    parser.add_argument("--api", required=True, metavar="URL", help="the run API")
    parser.add_argument(
        "--node-rank",
        required=True,
        type=node_number,
        metavar="NUMBER|NAME",
        help="1 or more, or a name that ends with -NUMBER",
    )
    parser.add_argument("--heartbeat", type=Path, metavar="FILE", help="file to touch in every iteration of the loop")
    options = parser.parse_args(arguments)
    configure_first_logging(os.environ)
    warn_of_unknown_variables(os.environ)
    try:
        settings = from_environment(TrainerSettings)
    except UserError as error:
        log_lines(log, error)
        return REFUSED
    hide_secrets(os.environ)
    configure_logging(settings.log_level, log_format=settings.log_format)
    if not settings.rendezvous_endpoint:
        log.critical("HEADRACE_RENDEZVOUS_ENDPOINT is not set: set it to HOST:PORT of the first machine's ranks")
        return REFUSED
    try:
        asyncio.run(_run(settings, options.api, node_rank=options.node_rank, heartbeat=options.heartbeat))
    except RunApiAwayError as error:
        log.critical("%s. Start this process again with the HEADRACE_API_KEY of the run API", error)
        return KEY_REFUSED
    return STOPPED


async def _run(settings: TrainerSettings, api_url: str, *, node_rank: int, heartbeat: Path | None) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    key = settings.api_key.get_secret_value()
    async with httpx.AsyncClient(
        base_url=api_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=_HTTP_TIMEOUT_S,
        **PeerTls(settings.tls_ca_file).for_async_client(),
    ) as api:
        await NodeFollower(settings, api, node_rank=node_rank, heartbeat=heartbeat).follow(stopping)


if __name__ == "__main__":
    sys.exit(main())
