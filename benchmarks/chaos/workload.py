"""The run that faults strike: a tiny model, sixty prompts, two reward functions, short steps, evaluations.

With simulated generators, weights are really sent over gloo, and tokens are random. Everything else is as in any run.
With a tool, the sessions service plays the rollouts and asks the generators for turns. Six in ten turns
of simulated generators call it.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

SIMULATED, VLLM = "simulated", "vllm"
MAX_STALENESS = 2
GROUPS_PER_STEP = 4
NUM_GENERATIONS = 4
LENGTH_REWARD = "chaos_rewards:length"
PROMPT_TOKENS = 4
"""Tokens of every prompt: a word, two letters, and a word. With a tool they are rendered as a conversation."""
_CONTEXT_TOKENS = 512
"""Room for the schema of the tool and its results, of which simulated generators count the characters."""
_COMPLETION_TOKENS, _COMPLETION_TOKENS_WITH_TOOL = 24, 200
_NUM_PROMPTS, _NUM_EVAL_PROMPTS = 60, 6
_REWARDS = '''
"""One function in a reward worker, one on the rewarder's loop."""
import asyncio


def length(completions, completion_ids, **columns):
    return [float(measure(*each) % 7) for each in zip(completions, completion_ids)]


def measure(completion, ids):
    if isinstance(completion, str):
        return len(ids)
    return sum(len(message["content"]) for message in completion if message["role"] == "assistant")


async def slow(completion_ids, **columns):
    await asyncio.sleep(0.1)
    return [float(sum(ids) % 5) for ids in completion_ids]
'''
_TOOLS = '''
def reverse(text: str) -> str:
    """Reverse a text.

    Args:
        text: The text.
    """
    return text[::-1]
'''
_CHAT_TEMPLATE = "{% if tools %}reverse {% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
_NUM_SIMULATED = 2
_SIMULATION = {
    "TRANSPORT": "gloo",
    "SPEED_UP": "0.5",
    "COMPLETION_TOKENS": "12",
    "FIRST_TOKEN_S": "0.02",
    "TOOL_CALL_SHARE": "0.6",
}


def length_reward(row: Mapping[str, Any]) -> float:
    """Return the value of the first reward function for a line of the rollout log.

    It counts tokens. Of a conversation, it counts the characters that the policy wrote: the ids of a completion include
    those of the results of tools, which the log does not have.
    """
    completion: Any = row.get("completion")
    if not isinstance(completion, list):
        return float(int(row["num_tokens"]) % 7)
    messages = cast("list[dict[str, Any]]", completion)
    return float(sum(len(message["content"]) for message in messages if message["role"] == "assistant") % 7)


def prepare(directory: Path) -> None:
    """Write the model, the data sets, the reward functions and the tool."""
    _write_model(directory / "model")
    pairs = itertools.product("abcdefghijkl", repeat=2)
    rows = [json.dumps({"prompt": f"reverse {first}{second} ="}) + "\n" for first, second in pairs]
    (directory / "train.jsonl").write_text("".join(rows[:_NUM_PROMPTS]), encoding="utf-8")
    (directory / "eval.jsonl").write_text("".join(rows[-_NUM_EVAL_PROMPTS:]), encoding="utf-8")
    (directory / "chaos_rewards.py").write_text(_REWARDS, encoding="utf-8")
    (directory / "chaos_tools.py").write_text(_TOOLS, encoding="utf-8")


def run_config(directory: Path, *, engine: str, max_steps: int, has_tool: bool) -> dict[str, Any]:
    """Return the config of the run to submit."""
    with_tool = {
        "tools": ["chaos_tools:reverse"],
        "prompt_as_message": True,
        "max_tool_calling_iterations": 3,
        "max_completion_length": _COMPLETION_TOKENS_WITH_TOOL,
    }
    config: dict[str, Any] = {
        "model": str(directory / "model"),
        "dataset_name": str(directory / "train.jsonl"),
        "reward_funcs": [LENGTH_REWARD, "chaos_rewards:slow"],
        "num_generations": NUM_GENERATIONS,
        "groups_per_step": GROUPS_PER_STEP,
        "max_steps": max_steps,
        "max_completion_length": _COMPLETION_TOKENS,
        "max_staleness": MAX_STALENESS,
        "save_steps": 5,
        "eval_dataset_name": str(directory / "eval.jsonl"),
        "eval_steps": 10,
        "learning_rate": 1e-5,
        "push_timeout_s": 20.0,
        **(with_tool if has_tool else {}),
    }
    # simulated generators cannot score probes
    return config if engine == VLLM else {**config, "push_probe_tolerance": None}


def generators(engine: str) -> list[str]:
    """Return the arguments of `headrace up` that select the generators."""
    return ["--generators", "1"] if engine == VLLM else ["--simulate", str(_NUM_SIMULATED)]


def environment(journal: Path) -> Mapping[str, str]:
    """Return environment variables of the services, in addition to those set by `headrace up`.

    Args:
        journal: File in which simulated generators note each turn that they have sampled.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HEADRACE_SIMULATED_TURN_JOURNAL": str(journal),
        **{f"HEADRACE_SIMULATED_{name}": value for name, value in _SIMULATION.items()},
    }


def _write_model(path: Path) -> None:
    from headrace.demo.model import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE
    model = make_model(tokenizer, seed=0)
    model.config.max_position_embeddings = _CONTEXT_TOKENS
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
