"""Finds the processes of a running `headrace up` by their command lines and parents.

harness -- launcher -- Redis
                   |-- trainer API -- rank
                   |-- generator -- engine worker         (only with vLLM)
                   |-- sessions -- fork server -- tool workers   (victims only if the runs have a tool)
                   +-- rewarder -- fork server -- reward workers
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.chaos import schedule
from headrace.local.process_table import descendants, is_alive
from headrace.local.state_dir import ProcessMark

_SERVICES = {
    "services.trainer": schedule.TRAINER,
    "services.generator": schedule.GENERATOR,
    "services.generator.simulated": schedule.GENERATOR,
    "services.rewarder": schedule.REWARDER,
    "services.sessions": schedule.SESSIONS,
}

_OF_FORK_SERVERS = {
    schedule.FORK_SERVER: schedule.REWARDER,
    schedule.REWARD_WORKER: schedule.REWARDER,
    schedule.TOOL_WORKER: schedule.SESSIONS,
}
"""The services that have these processes below their fork servers."""


def find(victim: str, launcher: int) -> list[ProcessMark]:
    """Return the processes below a launcher that have this role, perhaps none."""
    everybody = descendants(launcher)
    if victim == schedule.RANK:
        return [process for process in everybody if "services.trainer.rank" in _command(process)]
    if victim == schedule.REDIS:
        return [process for process in everybody if _command(process)[:1] and "valkey-server" in _command(process)[0]]
    services = [process for process in everybody if _service(process) == victim]
    if victim == schedule.ENGINE:
        generators = [process for process in everybody if _service(process) == schedule.GENERATOR]
        return [process for process in _below(generators) if "resource_tracker" not in " ".join(_command(process))]
    if victim in _OF_FORK_SERVERS:
        parents = [process for process in everybody if _service(process) == _OF_FORK_SERVERS[victim]]
        # A worker is a fork of the server, with the same command line.
        servers = [
            process for process in _below(parents) if "multiprocessing.forkserver" in " ".join(_command(process))
        ]
        servers = servers[:1]
        return servers if victim == schedule.FORK_SERVER else _below(servers)
    return services


def orphans(harness: int, launcher: int | None) -> list[ProcessMark]:
    """Return left-behind processes: those without a living launcher, or that their launcher has adopted.

    The harness adopts the children of a dead launcher. A launcher adopts the children of a dead service.
    """
    own = [] if launcher is None else [process.pid for process in descendants(launcher)]
    left = [process for process in descendants(harness) if process.pid not in {launcher, *own}]
    if launcher is not None:
        adopted = [process for process in descendants(launcher) if _parent(process) == launcher]
        left += [process for process in adopted if not _is_service(process)]
    return [process for process in left if is_alive(process)]


def describe(process: ProcessMark) -> str:
    """Return the pid and the command line of a process."""
    return f"{process.pid} {' '.join(_command(process))[:160]}"


def _is_service(process: ProcessMark) -> bool:
    command = _command(process)
    return (
        _service(process) is not None
        or any("valkey-server" in part for part in command[:1])
        or any("guarded_exec" in part for part in command)
    )


def _service(process: ProcessMark) -> str | None:
    command = _command(process)
    if "-m" not in command:
        return None
    return _SERVICES.get(command[min(command.index("-m") + 1, len(command) - 1)])


def _below(parents: Iterable[ProcessMark]) -> list[ProcessMark]:
    return [child for parent in parents for child in descendants(parent.pid)]


def _command(process: ProcessMark) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _parent(process: ProcessMark) -> int | None:
    try:
        return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
