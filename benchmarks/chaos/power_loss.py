"""Removes from a state directory only what a power cut may remove, which is data that no fsync has secured.

    file of a service   cut to a random size between the synced one (fsync_witness) and the current one
    Redis's file        cut to a size that it had up to 2 s ago: `appendfsync everysec` promises no more

The kernel writes back data that is older than 30 s by itself, so such files stay as they are. File names are assumed to
be on the disk: a file that was renamed without a sync keeps its new name, and may be empty.
"""

import os
import random
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

_WRITTEN_BACK_AFTER_S = 30.0
_LOOK_EVERY_S = 0.1
_EVERYSEC_S = 2.0


class AofSizes:
    """Records the sizes of Redis's append-only files over the last seconds; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sizes: deque[tuple[float, dict[Path, int]]] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch the AOF", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def earlier(self, seconds: float) -> dict[Path, int]:
        """Return the sizes that the files had ``seconds`` ago, without files that did not exist then."""
        at = time.monotonic() - seconds
        nothing: dict[Path, int] = {}
        return next((sizes for seen_at, sizes in reversed(tuple(self._sizes)) if seen_at <= at), nothing)

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            sizes: dict[Path, int] = {}
            for path in self._directory.glob("*/*.aof"):
                try:
                    sizes[path] = path.stat().st_size
                except OSError:
                    continue
            now = time.monotonic()
            self._sizes.append((now, sizes))
            while self._sizes[0][0] < now - 2 * _EVERYSEC_S:
                self._sizes.popleft()


def cut_aof(sizes: AofSizes, directory: Path, dice: random.Random) -> int:
    """Cut the newest append-only file to a size that it had up to 2 s ago, and return the number of removed bytes."""
    files = sorted(directory.glob("*/*.incr.aof"))
    if not files:
        return 0
    newest = files[-1]
    size = newest.stat().st_size
    kept = sizes.earlier(dice.uniform(0, _EVERYSEC_S)).get(newest, size)
    # The cut may be in the middle of a command: a disk knows nothing of commands.
    kept = min(size, kept + dice.randrange(0, max(1, size - kept)) if size > kept and dice.random() < 0.5 else kept)
    os.truncate(newest, kept)
    return size - kept


def lose_unsynced(state: Path, witness: Path, dice: random.Random) -> list[str]:
    """Cut the services' files to random sizes between the synced and the current one; return a note for each cut."""
    promised = _promised(witness)
    lost: list[str] = []
    for path in sorted(state.rglob("*")):
        if path.is_symlink() or not path.is_file() or (state / "redis") in path.parents:
            continue
        found = path.stat()
        if time.time() - found.st_mtime > _WRITTEN_BACK_AFTER_S:
            continue
        synced = min(promised.get((found.st_dev, found.st_ino), 0), found.st_size)
        kept = dice.choice((synced, found.st_size, dice.randint(synced, found.st_size)))
        if kept < found.st_size:
            os.truncate(path, kept)
            lost.append(f"{path.name}: {kept} of {found.st_size}")
    return lost


def _promised(witness: Path) -> dict[tuple[int, int], int]:
    promised: dict[tuple[int, int], int] = {}
    if witness.exists():
        for line in witness.read_text("utf-8").splitlines():
            parts = line.split()
            if len(parts) == 3:
                promised[int(parts[0]), int(parts[1])] = int(parts[2])
    return promised
