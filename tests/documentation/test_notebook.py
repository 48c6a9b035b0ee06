"""examples/first_run.ipynb goes from ``pip install`` to a plot and a table of rollouts in at most 15 lines."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"
MOST_LINES = 15
STEPS = 40
_IN_A_CLONE = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "headrace", "services", "shared")
_PIP_CHANGES_NOTHING = {
    "PIP_DRY_RUN": "1",
    "PIP_NO_BUILD_ISOLATION": "false",  # pip's way to say yes in an environment variable
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
}
"""The cell is run, and pip prepares the installation, in an environment in which other tests run."""


def code_cells(notebook: Path = NOTEBOOK) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_has_at_most_fifteen_lines_and_begins_with_pip_install() -> None:
    lines = [line for cell in code_cells() for line in "".join(cell["source"]).splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES
    assert "pip install" in "".join(code_cells()[0]["source"])
    assert not [cell for cell in code_cells() if cell["outputs"] or cell["execution_count"]], "clear all outputs"


def test_its_kernel_finds_what_pip_has_just_installed_in_it(tmp_path: Path) -> None:
    """An editable installation is a file with the path of the clone, which Python reads at its start."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=120)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    install, _, after = "".join(code_cells()[0]["source"]).rpartition("\n")
    assert install.splitlines()[-1].startswith("%pip install")
    code = f"from pathlib import Path; Path({str(packages / 'clone.pth')!r}).write_text({str(ROOT)!r})\n{after}\n"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(tmp_path / "bin" / "python"), "-c", f"{code}import headrace"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("nbconvert") is None, reason="pip install nbconvert ipykernel, and the notebook is run")
def test_nbconvert_executes_it_and_it_learns_plots_and_leaves_no_process(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    examples.mkdir()
    shutil.copy(NOTEBOOK, examples)
    for name in _IN_A_CLONE:
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PIP_"))}
    environment |= _PIP_CHANGES_NOTHING | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"),
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
    }
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--execute", "--to", "notebook", "--inplace"]
    done = subprocess.run(
        [*command, "--ExecutePreprocessor.timeout=600", str(examples / NOTEBOOK.name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    install, *_, plot, table = code_cells(examples / NOTEBOOK.name)
    said = json.dumps(install["outputs"])
    assert "does not provide the extra" not in said
    assert "rror" not in said
    assert [output for output in plot["outputs"] if "image/png" in output.get("data", {})], plot["outputs"]
    (shown,) = table["outputs"]
    header, *rows = re.findall(r"<tr.*?</tr>", "".join(shown["data"]["text/html"]), re.DOTALL)
    assert re.findall(r"<th>(\w+)</th>", header) == ["prompt", "completion", "reward", "advantage"]
    assert len(rows) >= 10
    (state_dir,) = (examples / ".headrace").glob("script-*")
    (log,) = state_dir.glob("runs/*/metrics.jsonl")
    rewards = [json.loads(line)["reward"] for line in log.read_text(encoding="utf-8").splitlines()]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    asyncio.run(eventually(lambda: not _processes_of(state_dir)))


def _processes_of(state_dir: Path) -> list[str]:
    """Return the processes that have the directory in their command line."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_text()
        except OSError:
            continue
        found += [said] if str(state_dir) in said else []
    return found
