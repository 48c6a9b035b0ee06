"""The run that faults strike: a tiny model, sixty prompts, two reward functions, short steps, evaluations.

With simulated generators, weights are really sent over gloo, and tokens are random. Everything else is as in any run.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIMULATED, VLLM = "simulated", "vllm"
MAX_STALENESS = 2
GROUPS_PER_STEP = 4
LENGTH_REWARD = "chaos_rewards:length"
PROMPT_TOKENS = 4
"""Tokens of every prompt: a word, two letters, and a word."""
_NUM_PROMPTS, _NUM_EVAL_PROMPTS = 60, 6
_REWARDS = '''
"""One function in a reward worker, one on the rewarder's loop."""
import asyncio


def length(completion_ids, **columns):
    return [float(len(ids) % 7) for ids in completion_ids]


async def slow(completion_ids, **columns):
    await asyncio.sleep(0.1)
    return [float(sum(ids) % 5) for ids in completion_ids]
'''
_NUM_SIMULATED = 2
_SIMULATION = {"TRANSPORT": "gloo", "SPEED_UP": "0.5", "COMPLETION_TOKENS": "12", "FIRST_TOKEN_S": "0.02"}


def length_reward(num_tokens: int) -> float:
    """Return the value of the first reward function."""
    return float(num_tokens % 7)


def prepare(directory: Path) -> None:
    """Write the model, the data sets and the reward functions."""
    _write_model(directory / "model")
    pairs = itertools.product("abcdefghijkl", repeat=2)
    rows = [json.dumps({"prompt": f"reverse {first}{second} ="}) + "\n" for first, second in pairs]
    (directory / "train.jsonl").write_text("".join(rows[:_NUM_PROMPTS]), encoding="utf-8")
    (directory / "eval.jsonl").write_text("".join(rows[-_NUM_EVAL_PROMPTS:]), encoding="utf-8")
    (directory / "chaos_rewards.py").write_text(_REWARDS, encoding="utf-8")


def run_config(directory: Path, *, engine: str, max_steps: int) -> dict[str, Any]:
    """Return the config of the run to submit."""
    config: dict[str, Any] = {
        "model": str(directory / "model"),
        "dataset_name": str(directory / "train.jsonl"),
        "reward_funcs": [LENGTH_REWARD, "chaos_rewards:slow"],
        "num_generations": 4,
        "groups_per_step": GROUPS_PER_STEP,
        "max_steps": max_steps,
        "max_completion_length": 24,
        "max_staleness": MAX_STALENESS,
        "save_steps": 5,
        "eval_dataset_name": str(directory / "eval.jsonl"),
        "eval_steps": 10,
        "learning_rate": 1e-5,
        "push_timeout_s": 20.0,
    }
    # simulated generators cannot score probes
    return config if engine == VLLM else {**config, "push_probe_tolerance": None}


def generators(engine: str) -> list[str]:
    """Return the arguments of `headrace up` that select the generators."""
    return ["--generators", "1"] if engine == VLLM else ["--simulate", str(_NUM_SIMULATED)]


def environment() -> Mapping[str, str]:
    """Return environment variables of the services, in addition to those set by `headrace up`."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **{f"HEADRACE_SIMULATED_{name}": value for name, value in _SIMULATION.items()},
    }


def _write_model(path: Path) -> None:
    from headrace.demo.model import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
