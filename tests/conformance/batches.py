"""Random batches for both trainers: the same completions, generator logprobs and rewards.

Prompts have different lengths. Some completions contain tokens that the policy did not sample (a tool's answer), some
end without end-of-sequence, and one reward function does not apply to all of them. All completions are different, so
that a row can be found again after TRL has shuffled them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.trainer.objective.advantages import batch_advantages
from services.trainer.policy.microbatches import TrainRow
from shared.arrays import Logprobs
from shared.messages import RewardOutcome
from shared.run_options.run_config import RunConfig
from tests.tiny_model import CHARACTERS, EOS_TOKEN_ID, SPECIAL, VOCAB_SIZE

REWARD_NAMES = ("first_reward", "second_reward")


@dataclass(frozen=True)
class Completion:
    """One completion, with the results of an engine and a reward service."""

    token_ids: tuple[int, ...]
    is_sampled: tuple[int, ...]
    generator_logprobs: tuple[float, ...]
    """One per token. The values of tokens that were not sampled have no meaning."""
    rewards: tuple[float | None, ...]
    """One per reward function; None if the function does not apply."""

    @property
    def is_truncated(self) -> bool:
        return self.token_ids[-1] != EOS_TOKEN_ID


@dataclass(frozen=True)
class PromptGroup:
    """One prompt, a text with one token per character, and its completions."""

    prompt: str
    completions: tuple[Completion, ...]

    @property
    def prompt_ids(self) -> list[int]:
        return [len(SPECIAL) + CHARACTERS.index(character) for character in self.prompt]


def random_groups(num_groups: int, num_generations: int, *, seed: int) -> list[PromptGroup]:
    """Return groups of random tokens, with generator logprobs of 0 until `sampled_by_another_policy` sets them."""
    rng = np.random.default_rng(seed)
    prompts: set[str] = set()
    while len(prompts) < num_groups:
        prompts.add("".join(rng.choice(list(CHARACTERS), int(rng.integers(1, 6)))))
    return [
        PromptGroup(prompt, tuple(_completion(rng, index) for index in range(num_generations)))
        for prompt in sorted(prompts)
    ]


def _completion(rng: np.random.Generator, index: int) -> Completion:
    length = int(rng.integers(3, 12))
    token_ids = [int(token) for token in rng.integers(len(SPECIAL), VOCAB_SIZE, length)]
    is_sampled = [1] * length
    if index % 4 == 1:  # a tool's answer in the middle
        is_sampled[1] = 0
    if index % 3 != 2:
        token_ids[-1] = EOS_TOKEN_ID
    rewards = (float(rng.normal()), None if index % 4 == 3 else float(rng.integers(0, 3)))
    return Completion(tuple(token_ids), tuple(is_sampled), (0.0,) * length, rewards)


def sampled_by_another_policy(
    groups: list[PromptGroup], logprobs: list[Logprobs], *, spread: float, seed: int
) -> list[PromptGroup]:
    """Return the groups with generator logprobs that differ from ``logprobs`` by about ``spread`` nats per token.

    Args:
        groups: Groups with completions in the order of ``logprobs``.
        logprobs: For each completion, the logprobs of its sampled tokens.
        spread: Standard deviation per token in nats; a third of it for the completion as a whole.
        seed: Seed of the differences.
    """
    rng = np.random.default_rng(seed)
    rows = iter(logprobs)

    def sampled(completion: Completion) -> Completion:
        logprobs_N = next(rows)
        of_all_tokens = np.zeros(len(completion.token_ids))
        drift_N = rng.normal(0, spread / 3) + rng.normal(0, spread, logprobs_N.size)
        of_all_tokens[np.array(completion.is_sampled) == 1] = (logprobs_N + drift_N).astype(np.float32)
        return replace(completion, generator_logprobs=tuple(float(value) for value in of_all_tokens))

    return [
        replace(group, completions=tuple(sampled(completion) for completion in group.completions)) for group in groups
    ]


def outcomes(group: PromptGroup, weights: tuple[float, ...]) -> list[list[RewardOutcome]]:
    """Return the outcomes that our reward service would return for the group."""
    return [
        [
            RewardOutcome(
                name=name, outcome="not_applicable" if value is None else "scored", value=value, weight=weight
            )
            for name, value, weight in zip(REWARD_NAMES, completion.rewards, weights, strict=True)
        ]
        for completion in group.completions
    ]


def train_rows(groups: list[PromptGroup], config: RunConfig) -> list[TrainRow]:
    """Return one row per completion with our advantages. If truncated completions are masked, leave them out."""
    advantages = batch_advantages(
        [outcomes(group, config.weights()) for group in groups],
        scale_rewards=config.scale_rewards,
        aggregation=config.multi_objective_aggregation,
    )
    return [
        _train_row(group, completion, 0.0 if advantages_G is None else float(advantages_G[index]))
        for group, advantages_G in zip(groups, advantages, strict=True)
        for index, completion in enumerate(group.completions)
        if not (config.mask_truncated_completions and completion.is_truncated)
    ]


def _train_row(group: PromptGroup, completion: Completion, advantage: float) -> TrainRow:
    is_sampled = np.array(completion.is_sampled, dtype=np.uint8)
    return TrainRow(
        token_ids=np.array([*group.prompt_ids, *completion.token_ids], dtype=np.int32),
        loss_mask=np.concatenate([np.zeros(len(group.prompt), dtype=np.uint8), is_sampled]),
        generator_logprobs=np.array(completion.generator_logprobs, dtype=np.float32)[is_sampled == 1],
        advantage=advantage,
    )


def row_key(row: TrainRow) -> tuple[int, ...]:
    """Return a key that distinguishes a row from all others."""
    return tuple(int(token) for token in row.token_ids)


def options(**chosen: Any) -> dict[str, Any]:
    """Return the options that have the same name in TRL and here."""
    return {"num_generations": 4, "max_completion_length": 16, "temperature": 0.9, **chosen}
