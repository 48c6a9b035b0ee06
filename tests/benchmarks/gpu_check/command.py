"""What the steps of the tests run: ``python -m tests.benchmarks.gpu_check.command FILE WORD ...``.

Notes its word in FILE, and then ends well, ends badly, or stays beside a child of a session of its own.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main(file: Path, word: str, *how: str) -> int:
    with file.open("a") as noted:
        noted.write(f"{word}\n")
    print(f"this is {word}", flush=True)  # noqa: T201
    if how == ("stay",):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        file.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    if how == ("leave a child",):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        file.with_suffix(".pids").write_text(f"{os.getpid()} {child.pid}")
    if how == ("fail",) or (how == ("fail at first",) and file.read_text().count(word) == 1):
        for number in range(50):
            print(f"line {number}")  # noqa: T201
        return 3
    print(json.dumps({"rate": 12.5, "mfu": None}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
