"""How processes end: with their code, and not held up by threads."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
BEGIN = """
import atexit, threading, time
from shared.service.exiting import run_and_exit
atexit.register(print, "atexit")
def main():
    print("main")
    {}
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 3", 3, "main\natexit\n"),
        ("threading.Thread(target=time.sleep, args=(600,)).start(); return 3", 3, "main\n"),
        ("threading.Thread(target=time.sleep, args=(600,)).start(); raise ValueError('a bug')", 1, "main\n"),
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); raise ValueError('a bug')", 1,
         "main\natexit\n"),
    ],
    ids=["as usual", "beside a thread", "a crash beside a thread", "a crash beside a daemon thread"],
)  # fmt: skip
def test_no_thread_keeps_a_process_from_ending_with_its_code(body: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(body) + "run_and_exit(main)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, said)
    assert ("ValueError: a bug" in done.stderr) == (code == 1)
