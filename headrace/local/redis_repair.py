"""Repairs append-only files that the embedded Redis cannot read: on request, cuts them where the damage begins.

    base.rdb   incr.1.aof   incr.2.aof      replayed in this order, which the manifest lists
                 ....X...                   damaged at X: the part before X is kept, the rest and incr.2 are lost

The checker is the server's binary, called by another name. All files are kept in another directory before one is cut.
An incomplete last record after a crash does not count as damage: the server removes it by itself.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.local.embedded_redis import server_binary
from shared.errors import UserError
from shared.files.disk_sync import sync

_APPEND_ONLY = "appendonlydir"
_MANIFEST = "appendonly.aof.manifest"
_ENTRY = re.compile(r"file (\S+) seq \d+ type ([bi])")
_OK_UP_TO = re.compile(r"ok_up_to=(\d+)")
_DAMAGED = (
    "Bad file format reading the append only file",
    "Unrecoverable error reading the append only file",  # also if a record begins with "*" and a zero
)
"""In the server's last log message if a file is damaged, and not only cut off by a crash."""


@dataclass(frozen=True)
class Damage:
    """The first damaged append-only file of the embedded Redis, in replay order.

    Attributes:
        num_good_bytes: Bytes before the damage. They are not used for a base file, of which nothing can be kept.
        later: Names of the files that are replayed after this one.
    """

    file: Path
    is_base: bool
    num_good_bytes: int
    later: tuple[str, ...]

    def __str__(self) -> str:
        if not self.file.exists():
            return f"{self.file} is missing"
        size = self.file.stat().st_size
        where = "damaged" if self.is_base else f"damaged at byte {self.num_good_bytes} of {size}"
        return f"{self.file} is {where}"


def why_unreadable(directory: Path, *, last_words: str) -> str:
    """Return a sentence with the file that Redis could not read and the repair; empty if it ended for another reason.

    Args:
        directory: The server's data directory.
        last_words: The last message in its log.
    """
    damage = find_damage(directory)
    if damage is None or not (damage.is_base or any(said in last_words for said in _DAMAGED)):
        return ""
    command = f"`headrace up --repair-redis --state-dir {shlex.quote(str(directory.parent))}`"
    kept = (
        "starts with an empty Redis. The records of all runs are lost"
        if damage.is_base
        else "goes on with the data before the damage. Later data are lost: runs submitted since then, and the "
        "progress of other runs since then; those continue from their checkpoints, and their missing prompts are "
        "sampled again"
    )
    return f"{damage}. {command} keeps a copy of the files and {kept}. Checkpoints and models are not affected"


def repair(directory: Path) -> str:
    """Cut the append-only files of the embedded Redis where they are damaged, and describe the repair in a sentence.

    Raises:
        UserError: The files cannot be read or written.
    """
    try:
        damage = find_damage(directory)
        return "the files of Redis are not damaged" if damage is None else _cut(damage)
    except OSError as error:
        raise UserError(f"the files of Redis in {directory} cannot be repaired: {error}") from error


def find_damage(directory: Path) -> Damage | None:
    """Return the first damaged file in replay order, or None. The server must not be running."""
    manifest = directory / _APPEND_ONLY / _MANIFEST
    if not manifest.exists():
        return None
    entries = _ENTRY.findall(manifest.read_text(encoding="utf-8"))
    for place, (name, kind) in enumerate(entries):
        file = manifest.with_name(name)
        num_good_bytes = _num_good_bytes(file, is_snapshot=file.suffix == ".rdb")
        if num_good_bytes is not None:
            later = tuple(later_name for later_name, _ in entries[place + 1 :])
            return Damage(file, kind == "b", num_good_bytes, later)
    return None


def _num_good_bytes(file: Path, *, is_snapshot: bool) -> int | None:
    """Return how many bytes of a damaged file can be read; None if the file is intact."""
    checker = "valkey-check-rdb" if is_snapshot else "valkey-check-aof"
    done = subprocess.run(
        [checker, str(file)],
        executable=server_binary(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return None
    found = _OK_UP_TO.search(done.stdout)
    return int(found[1]) if found else 0


def _cut(damage: Damage) -> str:
    said = str(damage)
    live = damage.file.parent
    aside = live.with_name(f"{_APPEND_ONLY}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    aside.mkdir(mode=0o700)
    for file in live.iterdir():
        os.link(file, aside / file.name)
    if damage.is_base:
        for file in live.iterdir():
            file.unlink()
        return f"{said}: Redis starts empty; its files are kept in {aside}"
    # Replace files instead of writing into them: the kept ones are hard links to the same data.
    shorter = live / ".shorter"
    shutil.copy(damage.file, shorter)
    os.truncate(shorter, damage.num_good_bytes)
    _put_in_place(shorter, damage.file)
    manifest = live / _MANIFEST
    lines = manifest.read_text(encoding="utf-8").splitlines(keepends=True)
    shorter.write_text("".join(line for line in lines if line.split()[1] not in damage.later), encoding="utf-8")
    _put_in_place(shorter, manifest)
    for name in damage.later:
        (live / name).unlink(missing_ok=True)
    return f"{said}, and was cut there; the original files are kept in {aside}"


def _put_in_place(file: Path, to: Path) -> None:
    """Replace ``to`` by ``file`` so that after a power loss either the old or the new file is there, whole."""
    sync(file)
    file.replace(to)
    sync(to.parent)
