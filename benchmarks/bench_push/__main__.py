"""A weight push compared with a bare broadcast of the same bytes: ``python -m benchmarks.bench_push``.

    trainer's policy --bare broadcast--> a process that does nothing else        } in turn, both while the generator's
                     --push-----------> a real generator, vLLM and all           } engine decodes
                     --AdamW step, delta encoding--> bytes that a delta has

Measured for three sizes of the model, in bfloat16 over gloo on loopback, which ``--wire`` makes as slow as a network. A
push is measured in full: finding the fleet, checks of names, conversion, packing, checksums, staging, the swap and the
probe. The last line is one JSON object.
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
import warnings
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import local_generator
from benchmarks.bench_push import wire
from benchmarks.bench_push.bare_broadcast import BareBroadcast
from benchmarks.bench_push.policies import LEARNING_RATES, SIZES, delta_shares, make_config, make_policy
from benchmarks.bench_trainer.workload import Workload, save_model
from benchmarks.local_generator import say
from headrace.local import cpu_placement
from services.trainer.push.packing import announce, pack
from services.trainer.push.prober import Prober, tolerance_of
from services.trainer.push.push_result import PushResult
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.transports import BUFFER_BYTES
from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from shared.weights.parameter_spec import total_bytes

_AHEAD = 16
"""Number of prompt groups kept waiting in the stream."""
_PARTS: dict[str, Callable[[PushResult], float]] = {
    "push": lambda push: push.total_s,
    "receive": lambda push: push.receive_s,
    "standstill": lambda push: push.standstill_s,
    "load": lambda push: push.load_s,
    "probe": lambda push: push.probe_s,
}


@dataclass
class Pairs:
    """Broadcasts and pushes that were made in turn."""

    num_bytes: int
    bare_s: list[float] = field(default_factory=list[float])
    pushes: list[PushResult] = field(default_factory=list[PushResult])

    def over_broadcast(self, part: str) -> float:
        """Return the time of a part of the push divided by that of the broadcast, in the median pair."""
        return statistics.median(_PARTS[part](push) / bare for push, bare in zip(self.pushes, self.bare_s, strict=True))

    def standstill_share(self) -> float:
        """Return the standstill as a share of the push, in the median push."""
        return statistics.median(push.standstill_s / push.total_s for push in self.pushes)

    def milliseconds(self) -> dict[str, float]:
        """Return the median times of the broadcasts and of each part of the pushes."""
        parts = {name: statistics.median(map(part, self.pushes)) for name, part in _PARTS.items()}
        return {
            name: round(1000 * seconds, 2)
            for name, seconds in {"broadcast": statistics.median(self.bare_s), **parts}.items()
        }


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_push", description="A weight push and a bare broadcast of the same bytes"
    )
    parser.add_argument("--pairs", type=int, default=15, help="measured pairs of a broadcast and a push (15)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps whose deltas are measured (3)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--only", choices=["push", "delta"], help="leave the other half out")
    parser.add_argument("--wire", metavar="RATE", help="rate of loopback, such as 1gbit; needs root")
    arguments = parser.parse_args()
    if arguments.wire and not wire.is_set_up():
        wire.set_up(arguments.wire, sys.argv[1:])
    warnings.simplefilter("ignore")
    local_generator.end_in_order()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with _scratch() as scratch:
        models = {size: save_model(SIZES[size], scratch / size) for size in arguments.sizes}
        results: dict[str, Any] = {"pairs": arguments.pairs, "transport": "gloo", "wire": arguments.wire or "loopback"}
        if arguments.only != "delta":
            results |= asyncio.run(_pushes(scratch, models, num_pairs=arguments.pairs))
        if arguments.only != "push":
            results["delta_share"] = {
                size: _deltas(model, size, num_steps=arguments.steps) for size, model in models.items()
            }
    print(json.dumps(results))


async def _pushes(scratch: Path, models: dict[str, Path], *, num_pairs: int) -> dict[str, Any]:
    measured: dict[str, Pairs] = {}
    for size, model in models.items():
        directory = scratch / f"run-{size}"
        directory.mkdir()
        measured[size] = await _measure(directory, model, size, num_pairs=num_pairs)
    _print_table(measured)
    return {
        "total_over_broadcast": {size: round(pairs.over_broadcast("push"), 3) for size, pairs in measured.items()},
        "receive_over_broadcast": {size: round(pairs.over_broadcast("receive"), 3) for size, pairs in measured.items()},
        "standstill_share": {size: round(pairs.standstill_share(), 4) for size, pairs in measured.items()},
        "ms": {size: pairs.milliseconds() for size, pairs in measured.items()},
        "bytes": {size: pairs.num_bytes for size, pairs in measured.items()},
    }


async def _measure(directory: Path, model: Path, size: str, *, num_pairs: int) -> Pairs:
    """Measure one size, with its own generator."""
    workload = SIZES[size]
    config = make_config(model, workload)
    async with local_generator.redis_server(directory) as (redis, url):
        with local_generator.generator(directory, redis_url=url, engine_args={}) as running:
            keys = await local_generator.begin_run(redis, f"run-{size}", config)
            with _placed():
                policy = make_policy(config)
                settings = PushSettings(
                    run_id=keys.run_id,
                    internal_key=local_generator.KEY,
                    transport="gloo",
                    push_timeout_s=60.0,
                    dtype=config.dtype,
                    incarnation=local_generator.INCARNATION,
                )
                sender = WeightSender(redis, settings)
                try:
                    await local_generator.until_pushed(sender, policy.named_weights, running)
                    async with _load(redis, keys, workload, running):
                        return await _pairs(redis, keys, policy, config, sender, size, num_pairs=num_pairs)
                finally:
                    await sender.close()


async def _pairs(
    redis: Redis, keys: RunKeys, policy: Any, config: RunConfig, sender: WeightSender, size: str, *, num_pairs: int
) -> Pairs:
    announced = announce(policy.named_weights())
    chunks = [chunk.cpu() for chunk in pack(policy.named_weights(), announced, buffer_bytes=BUFFER_BYTES)]
    tolerance = tolerance_of("auto", dtype=config.dtype, is_quantised=False)
    assert tolerance is not None
    prober = Prober(policy.probe, token_ids=range(2, 34), tolerance=tolerance)
    found = Pairs(total_bytes(announced))
    say(f"{size}: {total_bytes(announced) / 1e6:.1f} MB in {len(announced)} parameters, {len(chunks)} chunks")
    with BareBroadcast(chunks) as bare:
        for pair in range(num_pairs + 1):
            bare_s = await asyncio.to_thread(bare.seconds)
            result = await sender.push(policy.named_weights, policy_version=pair + 1, prober=prober)
            if not result.members:
                raise SystemExit(f"no replica took version {pair + 1}: {result.failed}")
            say(
                f"  {size}, pair {pair} of {num_pairs}: broadcast {1000 * bare_s:.1f} ms, push "
                f"{1000 * result.total_s:.1f} ms, of which standstill {1000 * result.standstill_s:.1f} ms"
            )
            if pair:  # the first pair warms up both
                found.bare_s.append(bare_s)
                found.pushes.append(result)
            await _until_decoding(redis, keys)
    return found


async def _until_decoding(redis: Redis, keys: RunKeys) -> None:
    """Wait until a group ends. The engine has then recomputed the cache that the push discarded, and decodes."""
    before = await redis.xlen(keys.completions)
    while await redis.xlen(keys.completions) == before:  # noqa: ASYNC110  the condition is in Redis
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _load(
    redis: Any, keys: RunKeys, workload: Workload, running: local_generator.GeneratorProcess
) -> AsyncGenerator[None]:
    """Keep the generator busy with prompt groups."""

    async def feed() -> None:
        rng, count = random.Random(0), 0
        while True:
            running.check()
            missing = _AHEAD + int(await redis.xlen(keys.completions)) - count
            prompts = [rng.choices(range(2, workload.vocab_size), k=32) for _ in range(missing)]
            await local_generator.add_prompts(redis, keys, prompts, first=count, size=workload.num_generations)
            count += len(prompts)
            await asyncio.sleep(0.5)

    feeding = asyncio.create_task(feed(), name="feed prompts")
    try:
        while not await redis.xlen(keys.completions):
            if feeding.done():
                feeding.result()
            await asyncio.sleep(0.1)
        yield
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding


def _deltas(model: Path, size: str, *, num_steps: int) -> dict[str, float]:
    shares: dict[str, float] = {}
    for learning_rate in LEARNING_RATES:
        found = delta_shares(
            make_config(model, SIZES[size], learning_rate=learning_rate), SIZES[size], num_steps=num_steps
        )
        shares[f"{learning_rate:g}"] = round(statistics.median(found), 5)
        each = ", ".join(f"{share:.4f}" for share in found)
        say(f"{size}, learning rate {learning_rate:g}: delta / full of steps 1 to {num_steps}: {each}")
    return shares


def _print_table(measured: dict[str, Pairs]) -> None:
    print(
        f"\n{'model':>6} {'MB':>7} {'broadcast ms':>13} {'push ms':>9} {'receive ms':>11} {'standstill ms':>14} "
        f"{'push / broadcast':>17} {'standstill share':>17}"
    )
    for size, pairs in measured.items():
        ms = pairs.milliseconds()
        print(
            f"{size:>6} {pairs.num_bytes / 1e6:7.1f} {ms['broadcast']:13.1f} {ms['push']:9.1f} {ms['receive']:11.1f} "
            f"{ms['standstill']:14.1f} {pairs.over_broadcast('push'):17.2f} {pairs.standstill_share():17.3f}"
        )


@contextlib.contextmanager
def _placed() -> Generator[None]:
    """Run this process on the cores on which `headrace up` runs the trainer's rank, away from vLLM's worker."""
    cores, placement = cpu_placement.available_cores(), local_generator.worker_placement()
    taken = {int(core) for core in placement.get(cpu_placement.WORKER_CORES, "").split(",") if core}
    before = torch.get_num_threads()
    if own := set(cores) - taken if taken else set[int]():
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


@contextlib.contextmanager
def _scratch() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench_push-") as directory:
        yield Path(directory)


if __name__ == "__main__":
    main()
