"""``python -m benchmarks.bench_rewarder.single_process``: calls the accuracy function directly on problems from stdin.

An input line is ``[group size, [[solution, completion], ...]]``. The output line is the seconds that all groups took.
"""

import json
import sys
import time

from services.rewarder.built_ins.accuracy import accuracy_reward


def main() -> None:
    """Answer until stdin ends."""
    for line in sys.stdin:
        group_size, rows = json.loads(line)
        began_at = time.perf_counter()
        for start in range(0, len(rows), group_size):
            group = rows[start : start + group_size]
            accuracy_reward([completion for _, completion in group], solution=[solution for solution, _ in group])
        print(time.perf_counter() - began_at, flush=True)


if __name__ == "__main__":
    main()
