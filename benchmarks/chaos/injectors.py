"""Injects one fault, and returns how to heal it.

inject(fault, site) --> Wound(at_s, heal)   or None: the victim does not exist at the moment
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from benchmarks.chaos import power_loss, schedule, victims
from benchmarks.chaos.life import WatchedRun
from benchmarks.chaos.power_loss import AofSizes
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.stack import Stack, kill, send
from benchmarks.chaos.state_disk import StateDisk
from headrace.local import process_table
from headrace.local.state_dir import ProcessMark

_SIGNALS = {schedule.KILL: signal.SIGKILL, schedule.TERM: signal.SIGTERM}
_BROKEN_BYTES = 32


@dataclass(frozen=True)
class Site:
    """The parts of the stack that faults strike."""

    stack: Stack
    disk: StateDisk
    aof_sizes: AofSizes
    run: Callable[[], WatchedRun | None]


@dataclass(frozen=True)
class Wound:
    """A fault that was injected.

    Attributes:
        at_s: When it was injected, in Unix seconds.
        heal: Undoes effects that do not end by themselves; returns False to be called again.
        note: Description of the fault, for people.
    """

    at_s: float
    heal: Callable[[], bool]
    note: str = ""


def inject(fault: Fault, site: Site) -> Wound | None:
    """Inject the fault; return None if the victim does not exist."""
    dice = random.Random(fault.dice)
    return _INJECTORS[fault.kind](fault, site, dice)


def _signal(fault: Fault, site: Site, dice: random.Random) -> Wound | None:
    victim = _pick(fault.victim, site, dice)
    if victim is None or not send(victim, _SIGNALS[fault.kind]):
        return None
    return Wound(time.time(), _nothing, f"pid {victim.pid}")


def _stop(fault: Fault, site: Site, dice: random.Random) -> Wound | None:
    victim = _pick(fault.victim, site, dice)
    if victim is None or not send(victim, signal.SIGSTOP):
        return None
    return Wound(time.time(), lambda: _resume(victim), f"pid {victim.pid}")


def _power_cut(_: Fault, site: Site, dice: random.Random) -> Wound | None:
    if site.stack.launcher is None:
        return None
    kill([*site.stack.everybody(), *victims.orphans(os.getpid(), site.stack.launcher)])
    at_s, state = time.time(), site.stack.state
    cut_bytes = power_loss.cut_aof(site.aof_sizes, state.redis, dice)
    lost = power_loss.lose_unsynced(state.path, site.stack.witness, dice)
    return Wound(at_s, _nothing, "; ".join([f"AOF lost {cut_bytes} bytes", *lost]))


def _disk_full(_: Fault, site: Site, __: random.Random) -> Wound | None:
    if not site.disk.is_own:
        return None
    site.disk.fill()
    return Wound(time.time(), lambda: _free(site.disk))


def _maxmemory(_: Fault, site: Site, __: random.Random) -> Wound | None:
    try:
        with _redis(site) as client:
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
    except (RedisError, OSError, ValueError):
        return None
    return Wound(time.time(), lambda: _unlimited(site))


def _damaged_checkpoint(fault: Fault, site: Site, dice: random.Random) -> Wound | None:
    run, rank = site.run(), _pick(schedule.RANK, site, dice)
    if run is None or rank is None or not send(rank, signal.SIGSTOP):
        return None
    found = sorted((run.run_dir / "checkpoints").glob("step_*"))
    whole = [checkpoint for checkpoint in found if checkpoint.name not in run.damaged]
    files = sorted(path for path in whole[-1].rglob("*") if path.is_file()) if len(whole) > 1 else []
    if not files:  # without an older checkpoint, the run would start from the beginning
        send(rank, signal.SIGCONT)
        return None
    damaged = dice.choice(files)
    done = _damage(damaged, dice)
    run.damage(whole[-1].name)
    send(rank, signal.SIGKILL)
    return Wound(time.time(), _nothing, f"{whole[-1].name}/{damaged.relative_to(whole[-1])} {done}")


def _cut_aof(_: Fault, site: Site, dice: random.Random) -> Wound | None:
    return _with_redis_dead(site, dice, lambda: f"lost {power_loss.cut_aof(site.aof_sizes, _data(site), dice)} bytes")


def _broken_aof(_: Fault, site: Site, dice: random.Random) -> Wound | None:
    """Append noise to the synced part of the file, as a disk may do when it loses power."""

    def break_it() -> str:
        power_loss.cut_aof(site.aof_sizes, _data(site), dice)
        newest = max(_data(site).glob("*/*.incr.aof"))
        with newest.open("ab") as file:
            file.write(dice.randbytes(_BROKEN_BYTES))
        return f"noise after {newest.stat().st_size - _BROKEN_BYTES} bytes"

    wound = _with_redis_dead(site, dice, break_it)
    return None if wound is None else Wound(wound.at_s, lambda: _repair(site.stack), wound.note)


_INJECTORS: Mapping[str, Callable[[Fault, Site, random.Random], Wound | None]] = {
    schedule.KILL: _signal,
    schedule.TERM: _signal,
    schedule.STOP: _stop,
    schedule.POWER_CUT: _power_cut,
    schedule.DISK_FULL: _disk_full,
    schedule.MAXMEMORY: _maxmemory,
    schedule.DAMAGED_CHECKPOINT: _damaged_checkpoint,
    schedule.CUT_AOF: _cut_aof,
    schedule.BROKEN_AOF: _broken_aof,
}


def _with_redis_dead(site: Site, dice: random.Random, work: Callable[[], str]) -> Wound | None:
    """Stop Redis, change its files, and kill it, so that no Redis works with the files meanwhile."""
    server = _pick(schedule.REDIS, site, dice)
    if server is None or not send(server, signal.SIGSTOP):
        return None
    note = work()
    send(server, signal.SIGKILL)
    return Wound(time.time(), _nothing, note)


def _pick(victim: str, site: Site, dice: random.Random) -> ProcessMark | None:
    launcher = site.stack.launcher
    if launcher is None:
        return None
    if victim == schedule.LAUNCHER:
        return process_table.mark(launcher)
    found = victims.find(victim, launcher)
    return dice.choice(found) if found else None


def _resume(victim: ProcessMark) -> bool:
    send(victim, signal.SIGCONT)
    return True


def _nothing() -> bool:
    return True


def _damage(path: Path, dice: random.Random) -> str:
    """Damage a file as disks and people do."""
    size = path.stat().st_size
    how = dice.choice(("flipped", "cut", "removed"))
    if how == "removed" or size == 0:
        path.unlink()
        return "removed"
    if how == "cut":
        os.truncate(path, dice.randrange(size))
        return "cut"
    at = dice.randrange(size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    return "flipped"


def _repair(stack: Stack) -> bool:
    """Restart the launcher with the option that its error message recommends."""
    stack.restart_with("--repair-redis")
    return True


def _free(disk: StateDisk) -> bool:
    disk.free()
    return True


def _data(site: Site) -> Path:
    return site.stack.state.redis


def _unlimited(site: Site) -> bool:
    with contextlib.suppress(RedisError, OSError, ValueError), _redis(site) as client:
        client.config_set("maxmemory", 0)
        return True
    return False


def _redis(site: Site) -> Any:
    return redis.Redis.from_url(site.stack.state.redis_url(), socket_timeout=5.0, socket_connect_timeout=2.0)
