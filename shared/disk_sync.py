"""Makes writes survive a power loss. Without a sync, a file that was just written may be empty or absent after it."""

import os
from pathlib import Path


def sync(*paths: Path) -> None:
    """Sync files, and the entries of directories, to the disk. A renamed file needs a sync of its directory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
