"""Checks at submit whether weights can be written to `weight_dir`.

    s3://bucket/prefix   writes, reads and removes an object: tests package, credentials, bucket, permissions
    /mnt/weights         checks that the directory, or its nearest existing parent, is writable

A local directory is not written to, so that a run that is only validated leaves nothing behind.
"""

import os
import secrets
from pathlib import Path

from shared.errors import PushError, UserError
from shared.weights.weight_store import open_store

_CONTENT = b"headrace tried whether it can write here; this may be removed"


def check_weight_dir(weight_dir: str) -> list[tuple[str, str]]:
    """Return setting and sentence for each error. Blocks for as long as the store takes."""
    path = weight_dir.removeprefix("file://")
    if "://" not in path:
        there = next(parent for parent in (Path(path), *Path(path).parents) if parent.exists())
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return []
        return [
            ("weight_dir", f"the trainer cannot write to {there}: fix its permissions, or choose another directory")
        ]
    name = f"check-{secrets.token_hex(8)}"
    try:
        store = open_store(weight_dir)
        store.write(f"{name}/probe", _CONTENT)
        content = store.read(f"{name}/probe")
        store.remove(name)
    except UserError as error:
        return [("weight_dir", str(error))]
    except PushError as error:
        return [("weight_dir", f"{error}. The trainer must be able to write, read and remove weights there")]
    if content != _CONTENT:
        return [("weight_dir", f"{weight_dir} returned other content than was written to it")]
    return []
