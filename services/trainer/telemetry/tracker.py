"""The process that runs one tracker's library: ``python -m services.trainer.telemetry.tracker NAME``.

tracker_process.py starts it.

    stdin    a head (run, project, settings), then one line per report: {"kind", "step", "metrics"} or {"kind", "step",
             "columns", "rows"}; kind is step, evaluation or completions
    stdout   one byte for the head and for each line, once the library has taken it
    stderr   output of the library

Any error ends this process with a traceback; the parent notices and continues without it. After a resume from an older
checkpoint some steps are made a second time. TensorBoard's event files drop the first attempt. The other libraries keep
it, and the second attempt is not sent. NAME.reported has a line "KIND STEP" for every report sent. Kinds are separate
because an evaluation is reported steps after its own step, and a resumed run may evaluate other steps than before.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from services.trainer.telemetry.tracker_libraries import TRACKERS, Tracker

_MAX_FINISH_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Pass each report on stdin to the tracker, unless the tracker has it already, and ack each one on stdout."""
    (name,) = sys.argv[1:] if argv is None else argv
    # Libraries print to stdout; their output must not count as acks.
    acks = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    lines = sys.stdin.buffer
    head = json.loads(lines.readline())
    tracker = TRACKERS[name](head)
    os.write(acks, b".")
    with (Path(head["directory"]) / f"{name}.reported").open("a+", encoding="ascii") as book:
        book.seek(0)
        sent_before: set[str] = set() if tracker.takes_back else set(book.read().splitlines())
        for text in lines:
            if not text.endswith(b"\n"):
                break  # the parent was killed
            line = json.loads(text)
            entry = f"{line['kind']} {line['step']}"
            if entry not in sent_before:
                _report(tracker, line)
                book.write(f"{entry}\n")
                book.flush()
            os.write(acks, b".")
    tracker.finish()
    return 0


def _report(tracker: Tracker, line: dict[str, Any]) -> None:
    if "metrics" in line:
        tracker.log(line["metrics"], step=line["step"])
    else:
        tracker.table(line["columns"], line["rows"], step=line["step"])


def _end_after(parent: int) -> None:
    """End this process ``_MAX_FINISH_S`` after its parent: a library may wait for the network forever."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_MAX_FINISH_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
