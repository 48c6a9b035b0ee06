"""A process that vLLM spawns ends with its parent."""

import os
import signal
import subprocess
import sys

import pytest

from services.generator.engine.vllm_environment import PARENT

pytestmark = pytest.mark.unit

CHILD = "import time; from services.generator.engine.spawned import end_with_parent; end_with_parent(); time.sleep(60)"


def test_a_child_whose_parent_was_gone_before_it_looked_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, PARENT: str(gone.pid)}, check=False)
    assert child.returncode == -signal.SIGKILL
