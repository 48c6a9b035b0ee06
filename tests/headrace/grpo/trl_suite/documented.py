"""Runs the scripts of TRL's page about GRPO with only their import changed, through real services and a real vLLM.

    python -m tests.headrace.grpo.trl_suite.documented TRL [--work DIR] [NAME...]    TRL: a checkout of huggingface/trl

Models and data sets of the hub are small stand-ins (stand_ins.py). A snippet that only defines a function gets a
trainer after it, and a function that the page leaves to the reader is defined before it. docs/python.md has the result.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.headrace.grpo.trl_suite.stand_ins import make_stand_ins

_ROOT = Path(__file__).resolve().parents[4]
_LIMIT_S = 900
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
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="trl-scripts-"))).absolute()
    hub = work / "hub"
    make_stand_ins(hub)
    page = (arguments.trl / "docs" / "source" / "grpo_trainer.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    results: dict[str, bool] = {}
    for name in arguments.names or SCRIPTS:
        script = work / f"{name.replace(' ', '_')}.py"
        script.write_text(_text(SCRIPTS[name], snippets), encoding="utf-8")
        began_at = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
        with script.with_suffix(".log").open("wb") as log:
            try:
                status = subprocess.run(
                    [sys.executable, str(script)], cwd=hub, env=environment, stdout=log, stderr=log, check=False,
                    timeout=_LIMIT_S,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = -1
        results[name] = status == 0
        said = script.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        took_s = time.monotonic() - began_at
        sys.stdout.write(f"{name} | {'ran' if status == 0 else 'failed'} | {took_s:.0f} s | {said[-1][:160]}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"ran": sum(results.values()), "scripts": len(results)}) + "\n")
    return 0 if all(results.values()) else 1


def _text(script: Script, snippets: list[str]) -> str:
    (snippet,) = (text for text in snippets if script.first in text)
    if script.without:
        snippet = snippet[: snippet.index(script.without)]
    whole = "\n".join([script.before, snippet, script.after])
    if "def main():" not in whole:
        whole += _END
    return re.sub(r"^from trl import", "from headrace import", whole, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
