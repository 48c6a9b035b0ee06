"""docs/tutorial.md as it is written, with the pages that continue it: reading rollouts, scoring, a notebook.

    a model that is not trained + every command and file of the tutorial, in order --> on a simulated generator
    before its `headrace down`: the Python of the other pages

The services, the run, its files and every command are real; only vLLM is not, because a real one takes minutes.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.demo.model import make_model, make_tokenizer
from tests.documentation.page_blocks import BLOCKS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_RUN_OF_THE_PAGE = "run-5gw27i3y3wx5wjkfpszykfmqbe"
_CHANGES = {
    "source .venv/bin/activate\nmkdir ~/first-run && cd ~/first-run\nheadrace demo": "",
    "headrace up --detach": "headrace up --detach --simulate 1",
    # The page's run is long enough for a reader, and a test asks the policy a few seconds later.
    '"max_steps": 20}': '"max_steps": 60}',
    f"*{_RUN_OF_THE_PAGE.removeprefix('run-')}": "*",
}


def code_of(page: str, *languages: str) -> list[tuple[str, str]]:
    """Return the languages and texts of the blocks of a page that are to be run, with the changes."""
    found: list[tuple[str, str]] = []
    for block in BLOCKS:
        if block.page == page and block.language in languages and not block.reason:
            text = block.text
            for old, new in _CHANGES.items():
                text = text.replace(old, new)
            found.append((block.language, text))
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return the reader's directory after `headrace demo`."""
    place = tmp_path / "first-run"
    made = place / ".headrace" / "demo-1" / "demo" / "model"
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0).save_pretrained(made)
    tokenizer.save_pretrained(made)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("headrace", " -m headrace"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{command} "$@"\n')
        (programs / name).chmod(0o700)
    yield place
    run(place, "bash", "-c", "headrace down || true")


def run(place: Path, *command: str) -> str:
    """Run a command in the reader's directory and environment, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment |= {
        "PATH": f"{place.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(place.parent / "matplotlib"),
    }
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_of_the_tutorial_and_the_python_of_the_pages_after_it_run_in_order(place: Path) -> None:
    assert len(code_of("docs/tutorial.md", "bash")) > 10
    for language, text in code_of("docs/tutorial.md", "bash", "python", "yaml"):
        if language == "python":
            (place / "my_rewards.py").write_text(text)
        elif language == "yaml":
            (place / "run.yaml").write_text(text)
        else:
            if text == "headrace down\n":
                continue_in_python(place)
            run(place, "bash", "-ec", text)
    assert not (place / ".headrace" / "endpoint.json").exists(), "the services have not ended"
    assert (place / "exported" / "config.json").exists()


def continue_in_python(place: Path) -> None:
    """Run the pages that continue the tutorial, each in one process, while the services run."""
    (run_dir,) = (place / ".headrace" / "runs").iterdir()
    for _, text in code_of("docs/reading-rollouts.md", "bash"):
        run(place, "bash", "-ec", text.replace(_RUN_OF_THE_PAGE, run_dir.name))
    said = python(place, "docs/reading-rollouts.md")
    assert "of all groups have equal rewards" in said
    assert "('my_rewards:letters_in_place', 'scored'): 2560" in said
    (scored,) = [text for _, text in code_of("docs/rewards.md", "python") if "/v1/score" in text]
    assert json.loads(run(place, sys.executable, "-c", scored)) == [1.0]
    told = python(place, "docs/notebook.md")
    assert "'steps': 60" in told
    assert "staleness/mean" in told
    assert Path(told.splitlines()[-1]).is_dir()


def python(place: Path, page: str) -> str:
    """Run all Python of a page as one script, as the cells of a notebook."""
    text = "\n".join(text for _, text in code_of(page, "python"))
    return run(place, sys.executable, "-c", f"import openai, pandas\n{text}")
