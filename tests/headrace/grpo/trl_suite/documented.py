"""Runs TRL's documented scripts with only their import changed, through real services.

    python -m tests.headrace.grpo.trl_suite.documented TRL [--work DIR] [--dry-run] [NAME...]
                                                     TRL: a checkout of huggingface/trl
    without --dry-run   those of the page about GRPO, trained with a real vLLM
    with it             these and the agents of agent_scripts.py, up to an accepted submit; generators are simulated

Models and data sets of the hub are small stand-ins (stand_ins.py). A snippet that only defines a function gets a
trainer after it, and a function that the page leaves to the reader is defined before it. docs/python.md has the result.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.local.state_dir import STATE_DIR_VARIABLE, StateDir
from tests.headrace.grpo.trl_suite import agent_scripts
from tests.headrace.grpo.trl_suite.agent_scripts import ACCEPTED, AgentScript
from tests.headrace.grpo.trl_suite.stand_ins import make_stand_ins

_ROOT = Path(__file__).resolve().parents[4]
_LIMIT_S = 900
_PAGE = "docs/source/grpo_trainer.md"
_OURS = ("GRPOConfig", "GRPOTrainer")
_ASYNC = "from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer"
_ASYNC_HERE = "from headrace import GRPOConfig as AsyncGRPOConfig, GRPOTrainer as AsyncGRPOTrainer"
_FUTURE = "from __future__ import annotations\n"
_CHECKS_ONLY = "import tests.headrace.grpo.trl_suite.dry_run\n"
_TRAINER = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs={reward},
    args=GRPOConfig(max_steps=3, max_completion_length=16),
    train_dataset=load_dataset("{data}", split="train"),
)
trainer.train()
"""
_END = """
print("steps", trainer.state.global_step, "loss", trainer.state.log_history[-1]["train_loss"])
"""
_TOOLS = """
from datasets import Dataset
from trl import GRPOConfig

def correct(completions, environments=None, **kwargs):
    return [float(len(completion)) for completion in completions]

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=correct,
    args=GRPOConfig(max_steps=3, max_completion_length=32),
    train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{n} * 3?"}]} for n in range(8)]),
    tools=[multiply, async_add],
)
trainer.train()
"""


@dataclass(frozen=True)
class Script:
    """A script of the page.

    Attributes:
        first: A line of its snippet, by which it is found.
        before: Definitions that the page leaves to the reader.
        after: What uses the snippet's functions, if it is no whole script.
        without: The end of the snippet that ``after`` replaces, from this text on.
    """

    first: str
    before: str = ""
    after: str = ""
    without: str = ""


SCRIPTS = {
    "quick start": Script("# train_grpo.py"),
    "length in tokens": Script(
        "scores to longer completions (in terms of token count)",
        after=_TRAINER.format(reward="reward_func", data="trl-lib/DeepMath-103K"),
    ),
    "length in characters": Script(
        "scores to longer completions (in terms of character count)",
        after=_TRAINER.format(reward="reward_func", data="trl-internal-testing/zen-standard"),
    ),
    "format": Script(
        "def format_reward_func(completions",
        after=_TRAINER.format(reward="format_reward_func", data="trl-lib/DeepMath-103K"),
    ),
    "reference": Script(
        "def reward_func(completions, ground_truth, **kwargs)",
        after=_TRAINER.format(reward="reward_func", data="trl-internal-testing/zen-standard"),
    ),
    "several tasks": Script(
        "def math_reward_func(prompts",
        before="def check_math_solution(prompt, completion):\n    return len(completion) % 2 == 0\n",
    ),
    "async": Script(
        "async def async_reward_func(prompts",
        after=_TRAINER.format(reward="async_reward_func", data="trl-lib/DeepMath-103K"),
    ),
    "logging": Script(
        "log_extra=None, log_metric=None",
        after=_TRAINER.format(reward="reward_func", data="trl-internal-testing/zen-standard"),
    ),
    "tools": Script("async def async_add(a: int", after=_TOOLS, without="trainer = GRPOTrainer("),
    "environment with its own prompts": Script("self.target = random.randint(1, 6)"),
    "environment with a data set": Script("Increment the counter to {i}."),
    "several environments": Script(
        "class CodingEnv:", before="def reward_func(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    ),
    "on many nodes": Script('parser.add_argument("--vllm_server_host"'),
}


def main() -> int:
    """Run the scripts and print a line for each; the last line is JSON. Return 0 if all ran to their end."""
    parser = argparse.ArgumentParser(prog="documented")
    parser.add_argument("trl", type=Path, help="a checkout of github.com/huggingface/trl")
    parser.add_argument("--work", type=Path, default=None, help="directory to work in, which is kept")
    parser.add_argument("names", nargs="*", help="only these scripts")
    parser.add_argument("--dry-run", action="store_true", help="only submit, and train nothing")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="trl-scripts-"))).absolute()
    hub = work / "hub"
    make_stand_ins(hub, further=agent_scripts.MODELS if arguments.dry_run else {})
    agent_scripts.make_beside(hub)
    known: dict[str, Script | AgentScript] = {**SCRIPTS, **(agent_scripts.SCRIPTS if arguments.dry_run else {})}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(hub)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
    }
    results: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if arguments.dry_run:
            environment[STATE_DIR_VARIABLE] = str(work / "state")
            stack.enter_context(_services(work, environment))
        for name in arguments.names or known:
            began_at = time.monotonic()
            results[name], reason = _run(name, known[name], arguments, work, environment)
            took_s = time.monotonic() - began_at
            sys.stdout.write(f"{name} | {results[name]} | {took_s:.0f} s | {reason}\n")
            sys.stdout.flush()
    counts = Counter(results.values())
    sys.stdout.write(json.dumps({**counts, "scripts": len(results)}) + "\n")
    return 1 if counts["failed"] else 0


def _run(
    name: str, script: Script | AgentScript, arguments: argparse.Namespace, work: Path, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Run a script, and return its result and the reason, or the last line that it printed."""
    if isinstance(script, AgentScript) and script.excluded:
        return "not started", script.excluded
    # With a prefix: a script called logging.py would hide Python's module from all others.
    file, trl, hub = work / f"script_{name.replace(' ', '_').replace('/', '_')}.py", arguments.trl, work / "hub"
    text = _agent_text(script, trl) if isinstance(script, AgentScript) else _text(script, _snippets(trl, _PAGE))
    file.write_text(_checks_only(text) if arguments.dry_run else text, encoding="utf-8")
    given = script.arguments if isinstance(script, AgentScript) else ()
    for beside in script.beside if isinstance(script, AgentScript) else ():
        shutil.copy(trl / beside, work / Path(beside).name)
        shutil.copy(trl / beside, hub / Path(beside).name)
    log_file = file.with_suffix(".log")
    with log_file.open("wb") as log:
        try:
            status = subprocess.run(
                [sys.executable, str(file), *given], cwd=hub, env={**environment}, stdout=log, stderr=log, check=False,
                timeout=_LIMIT_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = -1
    said = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    if not arguments.dry_run:
        return ("ran" if status == 0 else "failed"), said[-1][:160]
    accepted = status == 0 and any(line.startswith(ACCEPTED) for line in said)
    return ("accepted" if accepted else "failed"), said[-1][:300]


@contextlib.contextmanager
def _services(work: Path, environment: Mapping[str, str]) -> Generator[None]:
    """Run `headrace up` with a simulated generator while the block runs."""
    up = [sys.executable, "-m", "headrace", "up", "--simulate", "1", "--state-dir", environment[STATE_DIR_VARIABLE]]
    with (work / "up.log").open("wb") as log:
        process = subprocess.Popen(up, cwd=work / "hub", env={**environment}, stdout=log, stderr=log)
    try:
        state, deadline = StateDir(Path(environment[STATE_DIR_VARIABLE])), time.monotonic() + _LIMIT_S
        while (endpoint := state.endpoint()) is None or not endpoint.is_ready:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"headrace up did not start; see {work / 'up.log'}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(timeout=120)


def _snippets(trl: Path, page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (trl / page).read_text(encoding="utf-8"), re.DOTALL)


def _agent_text(script: AgentScript, trl: Path) -> str:
    if not script.snippets:
        return _imported_from_headrace((trl / script.file).read_text(encoding="utf-8"))
    snippets = _snippets(trl, script.file)
    found = [next(text for text in snippets if line in text) for line in dict.fromkeys(script.snippets)]
    return _imported_from_headrace("\n".join(found))


def _checks_only(text: str) -> str:
    """Return a script whose ``train()`` makes a dry run."""
    before, future, after = text.rpartition(_FUTURE)
    return f"{before}{future}{_CHECKS_ONLY}{after}"


def _imported_from_headrace(text: str) -> str:
    """Change the import line: what headrace has comes from headrace, and everything else still from trl."""

    def changed(line: re.Match[str]) -> str:
        names = [name.strip() for name in line[1].split(",")]
        ours = [name for name in names if name in _OURS]
        others = [name for name in names if name not in _OURS]
        lines = [f"from headrace import {', '.join(ours)}"] if ours else []
        return "\n".join([*lines, *([f"from trl import {', '.join(others)}"] if others else [])])

    text = re.sub(r"^from trl import ([\w, ]+)$", changed, text, flags=re.MULTILINE)
    return text.replace(_ASYNC, _ASYNC_HERE)


def _text(script: Script, snippets: list[str]) -> str:
    (snippet,) = (text for text in snippets if script.first in text)
    if script.without:
        snippet = snippet[: snippet.index(script.without)]
    whole = "\n".join([script.before, snippet, script.after])
    if "def main():" not in whole:
        whole += _END
    return _imported_from_headrace(whole)


if __name__ == "__main__":
    sys.exit(main())
