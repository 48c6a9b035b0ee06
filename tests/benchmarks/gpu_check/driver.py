"""Runs gpu_check with other steps on a machine that does not exist: ``python -m tests.benchmarks.gpu_check.driver``.

driver SETUP ARGUMENT ...      SETUP: a JSON file with the steps and the machine
"""

import sys
from pathlib import Path

import msgspec

from benchmarks.gpu_check import running
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.steps import Step


class Setup(msgspec.Struct):
    steps: list[Step]
    machine: Machine


if __name__ == "__main__":
    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Setup)
    running.SAY_EVERY_S = 0.2
    sys.exit(main(sys.argv[2:], steps=setup.steps, machine=lambda: setup.machine))
