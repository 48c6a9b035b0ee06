"""Prints the test files that `make check` runs: they have the mark `unit`, and can be read without torch and its like.

Run from the root of the repository; the Makefile does. pytest could select the mark itself, but it would import every
test file first, and most of them import torch.
"""

import re
import sys
from pathlib import Path

MARK = re.compile(r"^pytestmark = .*\bpytest\.mark\.unit\b", re.MULTILINE)
NEED_TORCH = Path("tests/weights")
"""Both ends of a weight push."""


def unit_files() -> list[Path]:
    """Return the files, in order."""
    files = [path for path in sorted(Path("tests").rglob("test_*.py")) if NEED_TORCH not in path.parents]
    return [path for path in files if MARK.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{path}\n" for path in unit_files()))
