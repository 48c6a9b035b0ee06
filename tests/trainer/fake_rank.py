"""Stands in for a training rank: at its n-th start it does what the n-th word of FAKE_RANK_PLAN says.

Talks to Redis over a bare socket, because importing a client would take longer than the tests.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


def main() -> int:
    directory = Path(os.environ["FAKE_RANK_DIR"])
    run = f"headrace:{{{sys.argv[1]}}}:run"
    with (directory / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    num_starts = len((directory / "starts").read_text().splitlines())
    plan = os.environ["FAKE_RANK_PLAN"].split()
    action, _, argument = plan[min(num_starts, len(plan)) - 1].partition("=")
    print(f"start {num_starts} on cpus {sorted(os.sched_getaffinity(0))}", flush=True)  # noqa: T201
    match action:
        case "finish":
            redis("HSET", run, "status", "finished")
            return 0
        case "step":
            redis("HSET", run, "progress", json.dumps({"step": int(argument)}))
            print("ValueError: the numbers are wrong", flush=True)  # noqa: T201
            return 1
        case "exit":
            print('{"level": "ERROR", "message": "the model is not there"}', flush=True)  # noqa: T201
            return int(argument)
        case "refuse":
            redis("HSET", run, "status", "failed", "reason", "the dataset is gone")
            return 2
        case "linger":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            redis("HSET", run, "status", argument or "finished")
        case "fail":
            redis("HSET", run, "status", "failed", "reason", "the dataset is gone")
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "work":
            signal.signal(signal.SIGTERM, leave)
        case _:
            raise AssertionError(action)
    (directory / "at_work").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)
        if action == "work" and b"stop" in redis("HGET", run, "desired"):
            redis("HSET", run, "status", "stopped")
            return 0
        if action == "fail" and b"failed" not in redis("HGET", run, "status"):  # resumed before this rank has ended
            return 2


def leave(_signal: int, _frame: object) -> None:
    """End as a rank does when it was asked to stop."""
    sys.exit(1)


def redis(*words: str) -> bytes:
    """Send one command and return the raw answer."""
    url = urlsplit(os.environ["HEADRACE_REDIS_URL"])
    message = f"*{len(words)}\r\n" + "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in words)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
        connection.sendall(message.encode())
        return connection.recv(65536)


if __name__ == "__main__":
    sys.exit(main())
