"""The script of docs/python.md trains a small model, with services and a vLLM of its own, which end with it."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.headrace.grpo.trl_suite.stand_ins import make_stand_ins

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

_ROOT = Path(__file__).resolve().parents[3]
_CHECKS = """
assert trainer.state.global_step == 3, trainer.state
assert trainer.state.log_history[-1]["rewards/brevity/mean"] > 0, trainer.state.log_history
assert trainer.evaluate(dataset.select(range(2)))["eval_groups/done"] == 2
from headrace.grpo import script_services
print("state", *script_services._started)
"""


def test_the_script_of_the_page_trains_and_leaves_no_process(tmp_path: Path) -> None:
    make_stand_ins(tmp_path)
    page = (_ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(from datasets import.*?)```", page, re.DOTALL)
    (tables,) = re.findall(r"```python\n(run_id = trainer.*?)```", page, re.DOTALL)
    shorter = script.replace("max_steps=200, max_completion_length=512", "max_steps=3, max_completion_length=16")
    assert shorter != script
    (tmp_path / "train.py").write_text(shorter + tables + _CHECKS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    state_dir = Path(done.stdout.rsplit("state ", 1)[1].strip())
    assert state_dir.parent == tmp_path / ".headrace"
    assert not (state_dir / "endpoint.json").exists(), "the launcher did not end its services"
    assert not _processes_with(str(state_dir))


def _processes_with(text: str) -> list[str]:
    """Return the command lines and environments of processes in which ``text`` occurs."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [said for name in ("cmdline", "environ") if text in (said := (process / name).read_text())]
    return found
