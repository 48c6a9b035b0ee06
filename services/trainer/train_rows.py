"""Turns a chosen group into what the core trains on: one row a scored completion."""

from services.trainer.microbatches import TrainRow
from services.trainer.step_metrics import TrainedGroup
from shared.arrays import unpack_ids, unpack_mask
from shared.run_config import RunConfig


def train_rows(group: TrainedGroup, config: RunConfig) -> list[TrainRow]:
    """Return what the core trains on: the scored completions, without the truncated ones if so configured."""
    rows: list[TrainRow] = []
    for rollout, reward, advantage in zip(
        group.waiting.group.rollouts, group.rewards_G.tolist(), group.advantages_G.tolist(), strict=True
    ):
        if reward != reward or (config.mask_truncated_completions and rollout.is_truncated()):
            continue
        rows.append(
            TrainRow(
                token_ids=unpack_ids(rollout.token_ids),
                loss_mask=unpack_mask(rollout.loss_mask),
                generator_logprobs=rollout.generator_logprobs(),
                advantage=advantage,
            )
        )
    return rows
