"""Computes the most memory that a run takes in Redis: the size of an encoded group, times the number of groups.

In agent runs, the recorded turns of a group take about as much. They are deleted once the group is complete.
"""

import math

import numpy as np

from headrace.plan.rows import Row
from headrace.plan.workload import Workload
from services.trainer.groups.schedule import BatchShape
from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.messages import PromptGroup, RewardOutcome, Rollout, ScoredGroup, Stamp, Turn, VersionSpan, encode
from shared.messages import Row as TokenRow
from shared.run_options.section import steps_of

REDIS = "redis"
_TEXT_BYTES_PER_TOKEN = 4
_REWRITE = 2
"""While the append-only file is rewritten, pages that change are in memory twice."""


def group_bytes(*, num_generations: int, prompt_tokens: int, completion_tokens: int, reward_funcs: list[str]) -> int:
    """Return the bytes of an encoded scored group with these lengths. Columns of the data set are not counted."""
    total = prompt_tokens + completion_tokens
    row = TokenRow(
        token_ids=pack_ids(np.zeros(total, dtype=np.int32)),
        loss_mask=pack_mask(np.repeat(np.array([0, 1], dtype=np.uint8), [prompt_tokens, completion_tokens])),
        logprobs=pack_logprobs(np.zeros(completion_tokens, dtype=np.float32)),
        version_spans=(VersionSpan(1000, 0, completion_tokens, 1),),
        turns=(Turn("assistant", prompt_tokens, total, "stop", 1.5e9, 1.5e9),),
    )
    rollouts = tuple(
        Rollout(
            rollout_id=f"00000000-{branch}",
            group_id="00000000",
            branch=branch,
            rows=(row,),
            completion="x" * (_TEXT_BYTES_PER_TOKEN * completion_tokens),
            rewards=tuple(RewardOutcome(name, "scored", 0.5, 1.0, version="0" * 12) for name in reward_funcs),
        )
        for branch in range(num_generations)
    )
    prompt = PromptGroup(
        run_id="run-" + "a" * 26,
        group_id="00000000",
        prompt="x" * (_TEXT_BYTES_PER_TOKEN * prompt_tokens),
        prompt_ids=pack_ids(np.zeros(prompt_tokens, dtype=np.int32)),
        columns={},
        num_generations=num_generations,
    )
    stamps = tuple(Stamp(event, 1.5e9, "generator-0") for event in ("admitted", "claimed", "generated", "scored"))
    return len(encode(ScoredGroup(prompt=prompt, rollouts=rollouts, stamps=stamps)))


def redis_rows(work: Workload) -> list[Row]:
    """Return the rows on the most memory that a run's streams take in Redis.

    Lengths are means, and evaluations are not counted.
    """
    config = work.config
    if work.completion_tokens is None:
        return [Row(REDIS, "a group", None, "bytes", "give --completion-tokens, or --from-run")]
    one = group_bytes(
        num_generations=config.num_generations,
        prompt_tokens=math.ceil(work.prompt_tokens or 0),
        completion_tokens=math.ceil(work.completion_tokens),
        reward_funcs=config.reward_funcs,
    )
    if config.save_steps < 1 and config.max_steps < 0:
        return [Row(REDIS, "groups, about", None, "groups", "save_steps is a share of the run; set max_steps")]
    # A trained or dropped group stays until a checkpoint contains it. Training goes on while a checkpoint is written.
    trained = BatchShape.of(config).groups(num_steps=2 * steps_of(config.save_steps, config.max_steps))
    kept = math.ceil(trained / (1.0 - work.rates.drop_share) - 1e-9)
    groups = work.max_unsettled + kept
    return [
        Row(REDIS, "a group", one, "bytes", "encoded as it travels, with 4 bytes of text a token and no columns"),
        Row(
            REDIS, "groups, about", groups, "groups",
            f"{work.max_unsettled} in flight + {kept} settled in 2 x save_steps steps, until a checkpoint",
        ),
        Row(REDIS, "streams, about", one * groups, "bytes", "a group x groups"),
        Row(
            REDIS, "maxmemory", _REWRITE * one * groups + (256 << 20), "bytes",
            "2 x streams, as rewriting the append-only file copies changed pages, and 256 MiB for events and records",
        ),
    ]  # fmt: skip
