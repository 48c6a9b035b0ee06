"""Compares replicas' samples token by token with transformers, for the weights that the replicas name.

A completion is divided into spans, one for each version that sampled it. Together they must cover it, each token once,
and the logprob of each token must be the one under the weights of its span.
"""

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from tests.weights.known_weights import PROMPT_IDS, logprobs_of
from tests.weights.replica import ReplicaProcess, Sample

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 1e-3
"""In nats, between two float32 implementations."""
_BATCH = 64


@dataclass(frozen=True)
class Completion:
    """A prompt and a replica's sample after it."""

    prompt_ids: list[int]
    sample: Sample


@dataclass
class Checked:
    """The results of a check of spans.

    Attributes:
        worst: Largest difference between the logprob of a token and its logprob under its version, in nats.
        versions: The versions that sampled a token.
    """

    num_completions: int
    num_tokens: int = 0
    num_spans: int = 0
    worst: float = 0.0
    versions: set[int] = field(default_factory=set[int])

    @property
    def num_crossings(self) -> int:
        """How often the version changed within a completion."""
        return self.num_spans - self.num_completions


def worst(sample: Sample, expected: Sequence[float], *, start: int = 0, end: int | None = None) -> float:
    """Return the largest difference between the sample's logprobs in a span and ``expected``."""
    return max(abs(mine - theirs) for mine, theirs in zip(sample.logprobs[start:end], expected, strict=True))


async def check(replica: ReplicaProcess, policy: Any, *, version: int, max_difference: float = MAX_DIFFERENCE) -> None:
    """Assert that the replica samples from ``policy``, and names it ``version``."""
    sample = await replica.sample(PROMPT_IDS, max_tokens=48)
    difference = worst(sample, logprobs_of(policy, PROMPT_IDS, sample.token_ids))
    log.info("%s, version %d: largest difference of logprobs %.2e", replica.replica_id, version, difference)
    assert sample.spans == [(version, 0, 48)]
    assert difference <= max_difference


@contextlib.asynccontextmanager
async def kept_busy(
    replica: ReplicaProcess, *, num_requests: int = 8, max_tokens: int = 200, refusals: list[int] | None = None
) -> AsyncGenerator[list[Completion]]:
    """Keep this many requests running on the replica; at the end, all completions have been yielded.

    A refused request raises, unless ``refusals`` is given; then the status of each refusal is added to it.
    """
    completions: list[Completion] = []
    is_over = asyncio.Event()

    async def keep_sampling(prompt_ids: list[int]) -> None:
        while not is_over.is_set():
            try:
                sample = await replica.sample(prompt_ids, max_tokens=max_tokens)
            except httpx.HTTPStatusError as error:
                if refusals is None:
                    raise
                refusals.append(error.response.status_code)
                continue
            assert len(sample.token_ids) == len(sample.logprobs) == max_tokens
            completions.append(Completion(prompt_ids, sample))

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_requests):
            tasks.create_task(keep_sampling([*PROMPT_IDS, 5 + number]), name=f"keep {replica.replica_id} sampling")
        try:
            yield completions
        finally:
            is_over.set()


def check_spans(completions: Sequence[Completion], policy_of: Callable[[int], Any]) -> Checked:
    """Assert that every token is in exactly one span, and compare its logprob with that under its version.

    ``policy_of`` returns the policy of a version, and raises if the version does not exist. It is called once for each.
    """
    checked = Checked(num_completions=len(completions))
    of_version: dict[int, list[tuple[Completion, int, int]]] = defaultdict(list)
    for completion in completions:
        _assert_covered(completion.sample)
        for version, start, end in completion.sample.spans:
            of_version[version].append((completion, start, end))
    for version, spans in of_version.items():
        policy = policy_of(version)
        checked.versions.add(version)
        checked.num_spans += len(spans)
        for first in range(0, len(spans), _BATCH):
            some = spans[first : first + _BATCH]
            expected = _logprobs(policy, [completion for completion, _, _ in some])
            for (completion, start, end), logprobs in zip(some, expected, strict=True):
                checked.num_tokens += end - start
                checked.worst = max(checked.worst, worst(completion.sample, logprobs[start:end], start=start, end=end))
    log.info("%s", checked)
    return checked


def _assert_covered(sample: Sample) -> None:
    """Assert that each token is in one span, and that its logprob is a number: ``max`` ignores NaN."""
    edges = [0]
    for _, start, end in sample.spans:
        assert start == edges[-1] < end, sample.spans
        edges.append(end)
    assert edges[-1] == len(sample.token_ids), sample.spans
    assert all(math.isfinite(logprob) for logprob in sample.logprobs)


def _logprobs(policy: Any, completions: Sequence[Completion]) -> list[list[float]]:
    """Return log p of each token of each completion; known_weights.logprobs_of does this for one completion.

    Shorter completions are padded at their ends, which earlier tokens do not see.
    """
    rows = [torch.tensor(completion.prompt_ids + completion.sample.token_ids) for completion in completions]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        logits: torch.Tensor = policy(ids_BT[:, :-1]).logits
    logprobs_BTV = torch.log_softmax(logits.double(), dim=-1)
    logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    found: list[list[float]] = []
    for logprobs_T, completion in zip(logprobs_BT, completions, strict=True):
        first = len(completion.prompt_ids) - 1
        ours: Any = logprobs_T[first : first + len(completion.sample.token_ids)]
        found.append([float(logprob) for logprob in ours])
    return found
