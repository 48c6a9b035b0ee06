"""Starts several training ranks with torchrun and supervises them. rank_command.py and node.py build its command.

    run API --> launcher on node 0 --torchrun--+--> rank 0: the run's rank, as with one rank  (rank.py)
                                               +--> rank 1, 2, ...: follow rank 0             (follower.py)
                launcher on node 1 --torchrun--+--> rank 3, 4, ...                   started by hand, or by Kubernetes

When a rank fails, torchrun ends the other ranks of its machine, and ranks on other machines see their connections
close. The launcher does not restart ranks: the run API restarts all of them from the checkpoint. Launchers of other
nodes join again until the run is over. The exit status is defined in exit_status.py and reflects the reason of
the failure, not which rank ended first.
"""

import argparse
import logging
import math
import os
import signal
import sys
import time
from dataclasses import dataclass

from services.trainer.ranks.exit_status import CRASHED, ENDED, FENCED, REFUSED
from services.trainer.ranks.rank_group import LAUNCHER_PID
from services.trainer.ranks.rank_words import Word, read_words, root_cause
from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import split_endpoint
from shared.errors import UserError
from shared.service.logs import about_run, configure_logging
from shared.settings import from_environment

log = logging.getLogger("services.trainer.supervision.rank_launcher")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 15.0


def main(arguments: list[str] | None = None) -> int:
    """Run the ranks of this machine and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.supervision.rank_launcher",
        description="Starts the training ranks of one machine. The run API does it on the first machine. For a run "
        "with nnodes > 1, start this on every other machine, with the same RUN_ID, --nnodes, --nproc-per-node and "
        "--endpoint.",
    )
    parser.add_argument("run_id", metavar="RUN_ID")
    parser.add_argument("--nproc-per-node", type=int, required=True, help="number of ranks on this machine")
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this machine; 0 is the run API's")
    parser.add_argument("--endpoint", default="127.0.0.1:0", help="HOST:PORT on node 0, its rendezvous_endpoint")
    parser.add_argument("command", nargs="*", help="command of a rank, after '--'; the run id is appended")
    options = parser.parse_args(arguments)
    if not 0 <= options.node_rank < options.nnodes or options.nproc_per_node < 1:
        parser.error("--node-rank must be below --nnodes, and --nproc-per-node at least 1")
    try:
        host, _ = split_endpoint(options.endpoint)
        settings = from_environment(TrainerSettings)
    except UserError as error:
        parser.error(str(error))
    except ValueError as error:
        parser.error(f"--endpoint: {error}")
    configure_logging(settings.log_level, log_format=settings.log_format)
    about_run(options.run_id)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpus = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus // options.nproc_per_node)))
    node = Node(
        run_id=options.run_id,
        num_ranks=options.nproc_per_node,
        num_nodes=options.nnodes,
        node_rank=options.node_rank,
        endpoint=options.endpoint,
        command=tuple(options.command or (sys.executable, "-m", "services.trainer.rank")),
        timeout_s=settings.collective_timeout_s,
        stop_grace_s=settings.rank_stop_grace_s,
    )
    # Imported late, so that --help stays fast.
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        return launch(node) if node.node_rank == 0 else _join_until_over(node)
    except SignalException:
        log.info("asked to end; the ranks of this machine have ended")
        return CRASHED


@dataclass(frozen=True)
class Node:
    """One machine's part in a group of training ranks."""

    run_id: str
    num_ranks: int
    """Ranks on each machine."""
    num_nodes: int
    node_rank: int
    endpoint: str
    command: tuple[str, ...]
    """Command of a rank; the run id is appended."""
    timeout_s: float
    """How long to wait for all machines to join, in seconds."""
    stop_grace_s: float
    """Time from SIGTERM to SIGKILL of a rank, in seconds."""


def launch(node: Node) -> int:
    """Start the ranks of this machine, wait for them, and return the exit status of the group.

    Raises:
        SignalException: This process was asked to end, and its ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from services.trainer.supervision.rank_rendezvous import BACKEND, newest_store, register

    register()
    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=node.num_ranks,
        run_id=node.run_id,
        role="rank",
        rdzv_backend=BACKEND,
        rdzv_endpoint=node.endpoint,
        rdzv_configs={"rank": node.node_rank, "timeout": node.timeout_s},
        max_restarts=0,
        local_addr=split_endpoint(node.endpoint)[0],
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=math.ceil(node.stop_grace_s),
    )
    try:
        elastic_launch(config, node.command[0])(*node.command[1:], node.run_id)
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _status_of(statuses, read_words(newest_store(), num_ranks=node.num_nodes * node.num_ranks))
    except UserError as error:
        log.critical("%s", error)
        return REFUSED
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        log.critical("the training ranks could not meet at %s: %s", node.endpoint, reason)
        return CRASHED
    return ENDED


def _join_until_over(node: Node) -> int:
    """Start this machine's ranks again each time the group crashes, until the run is over; return the exit status."""
    pause_s = _FIRST_PAUSE_S
    while True:
        began_at = time.monotonic()
        status = launch(node)
        if status != CRASHED:
            return status
        pause_s = _FIRST_PAUSE_S if time.monotonic() - began_at > 60 else min(2 * pause_s, _LAST_PAUSE_S)
        log.warning("the group of training ranks ended; joining it again in %.0f s", pause_s)
        time.sleep(pause_s)


def _status_of(statuses: dict[int, int], words: dict[int, Word]) -> int:
    """Log why the group of ranks ended, as the last line of the log, and return the exit status of the group."""
    said = [*statuses.values(), *(word.status for word in words.values() if not word.is_loss)]
    status = next((wanted for wanted in (FENCED, REFUSED) if wanted in said), CRASHED)
    # torchrun sends SIGTERM to the remaining ranks.
    killed = {rank: -code for rank, code in statuses.items() if code < 0 and -code != signal.SIGTERM}
    cause = root_cause(words, killed) or f"exit statuses by rank: {dict(sorted(statuses.items()))}"
    if status == CRASHED:
        log.critical("the training ranks end and will be started again: %s", cause)
    else:
        log.critical("%s", cause)
    return status


if __name__ == "__main__":
    sys.exit(main())
