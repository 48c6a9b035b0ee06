"""Turns of agents through the sessions service, beside vLLM alone: ``python -m benchmarks.bench_agents``.

    N sessions at a time --4 turns of 32 tokens, between them a tool that takes 0, 50 or 500 ms-->
        straight at vLLM's OpenAI server ---------------------------+
        through the sessions service to a generator ----------------+--> in turn; medians of the ratios

One program plays the agent on both sides, with the same messages. All turns have the same number of tokens, because
end-of-sequence is forbidden. Engines, model and cores are the same; one side is idle while the other works. The last
line is one JSON object: token rate over bare, milliseconds added a turn, and CPU milliseconds a turn.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import local_generator
from benchmarks.bench_agents import never_end
from benchmarks.bench_agents.sides import Side, sessions_service, vllm_server
from benchmarks.bench_end_to_end.processes import tree_cpu_s
from benchmarks.bench_generator.workload import LARGE, SMALL
from benchmarks.bench_trainer.workload import Workload, save_model
from benchmarks.local_generator import say
from services.generator.engine.spawned import watch_children
from services.generator.engine.vllm_environment import is_cpu_build, set_environment
from shared.run_options.run_config import RunConfig

SESSIONS = {1: 4, 16: 48, 64: 128}
"""Maps the number of sessions at a time to the total number of sessions of a round."""
TOOL_MS = (0, 50, 500)
NUM_TURNS = 4
TOKENS_PER_TURN = 32
_PROMPT_WORDS, _RESULT_WORDS = 24, 16
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "The word."}}},
    },
}
_TEMPLATE = (
    "{% if tools %}t2 {% for tool in tools %}t3 {% endfor %}{% endif %}"
    "{% for message in messages %}{{ {'user': 't4', 'assistant': 't5', 'tool': 't6', 'system': 't7'}[message.role] }}"
    " {{ message.content }} {% if message.tool_calls %}t8 {% endif %}<eos> {% endfor %}"
    "{% if add_generation_prompt %}t5 {% endif %}"
)


@dataclass
class Round:
    """One round of one side: seconds, CPU seconds of its servers, and seconds of each turn."""

    seconds: float
    cpu_s: float
    turns_s: list[float]


@dataclass
class Load:
    """The measured rounds of one load, in turn."""

    bare: list[Round] = field(default_factory=list[Round])
    ours: list[Round] = field(default_factory=list[Round])

    def rate_over_bare(self) -> float:
        """Return the token rate divided by bare vLLM's, in the median pair."""
        return statistics.median(bare.seconds / ours.seconds for bare, ours in zip(self.bare, self.ours, strict=True))

    def added_ms(self) -> float:
        """Return the milliseconds added to a median turn, in the median pair."""
        return statistics.median(
            1000 * (statistics.median(ours.turns_s) - statistics.median(bare.turns_s))
            for bare, ours in zip(self.bare, self.ours, strict=True)
        )

    def cpu_ms(self, rounds: list[Round]) -> float:
        """Return the CPU milliseconds of a turn, in the median round."""
        return statistics.median(1000 * one.cpu_s / len(one.turns_s) for one in rounds)


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_agents", description="Turns through the sessions service and straight at vLLM"
    )
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of rounds for each load (5)")
    parser.add_argument("--sessions", type=int, nargs="+", default=list(SESSIONS), choices=list(SESSIONS), metavar="N")
    parser.add_argument("--tool-ms", type=int, nargs="+", default=list(TOOL_MS), metavar="MS")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    local_generator.end_in_order()
    watch_children()
    os.environ.update(local_generator.worker_placement())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    set_environment(os.environ, is_cpu=is_cpu_build(), log_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="bench_agents-") as scratch:
        results = asyncio.run(
            measure(Path(scratch), sessions=arguments.sessions, tools_ms=arguments.tool_ms, num_pairs=arguments.pairs)
        )
    print(json.dumps(results))


async def measure(scratch: Path, *, sessions: list[int], tools_ms: list[int], num_pairs: int) -> dict[str, Any]:
    """Measure every load."""
    from services.generator.engine.engine import import_vllm

    has_cuda = await import_vllm({})
    workload = LARGE if has_cuda else SMALL
    model = _save_model(workload, scratch / "model")
    engine_args: dict[str, Any] = {"max_num_seqs": max(sessions), "logits_processors": [never_end.NAME]}
    if has_cuda:
        engine_args["gpu_memory_utilization"] = 0.4  # two engines share the GPU
    say(f"{workload.num_parameters() / 1e6:.1f} million weights, {NUM_TURNS} turns of {TOKENS_PER_TURN} tokens")
    async with _sides(scratch, model, workload, engine_args, has_cuda=has_cuda) as (bare, ours):
        measured = {
            (count, tool_ms): await _measure_load(bare, ours, count, tool_ms, num_pairs=num_pairs)
            for count in sessions
            for tool_ms in tools_ms
        }
    _print_table(measured)
    named = {f"{count} x {tool_ms} ms": load for (count, tool_ms), load in measured.items()}
    return {
        "device": "GPU" if has_cuda else f"CPU, {os.cpu_count()} cores",
        "pairs": num_pairs,
        "rate_over_bare": {name: round(load.rate_over_bare(), 3) for name, load in named.items()},
        "added_ms": {name: round(load.added_ms(), 1) for name, load in named.items()},
        "cpu_ms": {name: round(load.cpu_ms(load.ours), 1) for name, load in named.items()},
        "cpu_ms_bare": {name: round(load.cpu_ms(load.bare), 1) for name, load in named.items()},
    }


@contextlib.asynccontextmanager
async def _sides(
    scratch: Path, model: Path, workload: Workload, engine_args: dict[str, Any], *, has_cuda: bool
) -> AsyncGenerator[tuple[Side, Side]]:
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "dataset_name": "none.jsonl",
            "prompt_as_message": True,
            "reward_funcs": ["accuracy_reward"],
            "tools": ["look_up_tool:look_up"],
            "max_prompt_length": workload.max_prompt_length,
            "max_completion_length": workload.max_completion_length,
            "dtype": "bfloat16" if has_cuda else "float32",
        }
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * max(SESSIONS))
    key = {"authorization": f"Bearer {local_generator.KEY}"}
    async with contextlib.AsyncExitStack() as stack:
        redis, url = await stack.enter_async_context(local_generator.redis_server(scratch))
        running = stack.enter_context(local_generator.generator(scratch, redis_url=url, engine_args=engine_args))
        keys = await local_generator.begin_run(redis, "run-agents", config)
        await local_generator.push_weights(redis, keys, model, running)
        service_url, service = stack.enter_context(sessions_service(scratch, redis_url=url))
        vllm_url, vllm = stack.enter_context(
            vllm_server(scratch, model=model, engine_args=engine_args, has_cuda=has_cuda)
        )
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(headers=headers, limits=limits, timeout=600.0, trust_env=False)
            )
            for headers in ({}, key)
        ]
        yield (
            Side(vllm_url, clients[0], [vllm]),
            Side(service_url, clients[1], [service, running.process], run_id=keys.run_id),
        )


async def _measure_load(bare: Side, ours: Side, count: int, tool_ms: int, *, num_pairs: int) -> Load:
    found = Load()
    for pair in range(num_pairs + 1):
        rounds: dict[str, Round] = {}
        sides = {"bare": bare, "sessions": ours}
        for name in sides if pair % 2 else reversed(sides):
            rounds[name] = await _round(sides[name], count, tool_s=tool_ms / 1000, seed=pair)
        bare_s, ours_s = rounds["bare"].seconds, rounds["sessions"].seconds
        say(
            f"  {count:2} sessions, tool {tool_ms} ms, pair {pair} of {num_pairs}: bare {bare_s:.2f} s, "
            f"sessions {ours_s:.2f} s, {bare_s / ours_s:.3f}"
        )
        if pair:  # the first pair warms up both sides
            found.bare.append(rounds["bare"])
            found.ours.append(rounds["sessions"])
    return found


async def _round(side: Side, count: int, *, tool_s: float, seed: int) -> Round:
    waiting = list(range(SESSIONS[count]))
    turns_s: list[float] = []

    async def work() -> None:
        while waiting:
            await _play(side, random.Random(f"{seed}-{waiting.pop()}"), turns_s, tool_s=tool_s)

    cpu_began_at_s = sum(tree_cpu_s(process.pid) for process in side.processes)
    began_at = time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for index in range(count):
            workers.create_task(work(), name=f"agent {index}")
    seconds = time.perf_counter() - began_at
    return Round(seconds, sum(tree_cpu_s(process.pid) for process in side.processes) - cpu_began_at_s, turns_s)


async def _play(side: Side, words: random.Random, turns_s: list[float], *, tool_s: float) -> None:
    """Play one session: the agent."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _words(words, _PROMPT_WORDS)}]
    async with side.session() as (base_url, headers):
        for number in range(NUM_TURNS):
            if number:
                await asyncio.sleep(tool_s)
                messages.append({"role": "user", "content": _words(words, _RESULT_WORDS)})
            body = {"model": "policy", "messages": messages, "tools": [_TOOL], "max_tokens": TOKENS_PER_TURN}
            began_at = time.perf_counter()
            answer = await side.http.post(f"{base_url}/chat/completions", json=body, headers=headers)
            turns_s.append(time.perf_counter() - began_at)
            if answer.is_error:
                sys.exit(f"{base_url} answered {answer.status_code}: {answer.text[:1000]}")
            found = answer.json()
            if found["usage"]["completion_tokens"] != TOKENS_PER_TURN:
                sys.exit(f"{base_url}: {found['usage']['completion_tokens']} tokens instead of {TOKENS_PER_TURN}")
            messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})


def _words(words: random.Random, count: int) -> str:
    return " ".join(f"t{words.randrange(16, SMALL.vocab_size)}" for _ in range(count))


def _save_model(workload: Workload, directory: Path) -> Path:
    from transformers import AutoTokenizer

    save_model(workload, directory)
    loader: Any = AutoTokenizer  # partly untyped
    tokenizer: Any = loader.from_pretrained(directory)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def _print_table(measured: dict[tuple[int, int], Load]) -> None:
    print(
        f"\n{'sessions':>8} {'tool ms':>8} {'bare turn ms':>13} {'ours':>8} {'added':>7} {'rate over bare':>15} "
        f"{'pairs':>16} {'CPU ms a turn, bare':>20} {'ours':>7}"
    )
    for (count, tool_ms), load in measured.items():
        ratios = sorted(bare.seconds / ours.seconds for bare, ours in zip(load.bare, load.ours, strict=True))
        turns = [1000 * statistics.median(s for one in side for s in one.turns_s) for side in (load.bare, load.ours)]
        print(
            f"{count:8} {tool_ms:8} {turns[0]:13.1f} {turns[1]:8.1f} {load.added_ms():7.1f} "
            f"{load.rate_over_bare():15.3f} {f'{ratios[0]:.3f} .. {ratios[-1]:.3f}':>16} "
            f"{load.cpu_ms(load.bare):20.1f} {load.cpu_ms(load.ours):7.1f}"
        )


if __name__ == "__main__":
    main()
