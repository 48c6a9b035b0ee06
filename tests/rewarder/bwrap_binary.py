"""A real bubblewrap for the tests: HEADRACE_BWRAP, the one in PATH, or Debian's package, unpacked but not installed."""

import os
import shutil
import subprocess
from pathlib import Path


def find_or_fetch(directory: Path) -> str:
    """Return the path of bubblewrap.

    Args:
        directory: Where to put a downloaded one. Every user must be able to read it.
    """
    known = os.environ.get("HEADRACE_BWRAP") or shutil.which("bwrap")
    if known:
        return known
    fetch = (
        'apt=(apt-get -qq -o Dir::Cache="$PWD/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=1)\n'
        "mkdir -p cache/archives/partial lists/partial\n"
        '"${apt[@]}" download bubblewrap || '
        '{ apt+=(-o Dir::State::lists="$PWD/lists") && "${apt[@]}" update && "${apt[@]}" download bubblewrap; }\n'
        "dpkg-deb -x bubblewrap_*.deb unpacked\n"
    )
    done = subprocess.run(
        ["bash", "-ec", fetch], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )
    found = directory / "unpacked" / "usr" / "bin" / "bwrap"
    assert found.is_file(), (
        "these tests run code in a real bubblewrap, which is missing and cannot be downloaded: install the package "
        f"bubblewrap, or name the program with HEADRACE_BWRAP\n{done.stderr}"
    )
    return str(found)
