"""A loss, weights or a gradient that is not finite ends the run, and a post-mortem names its rollouts."""

import errno
import json
import math
from pathlib import Path
from typing import cast

import pytest
import torch

from services.trainer.checkpoints.checkpoint_writer import CheckpointError, CheckpointWriter, PendingCheckpoint
from services.trainer.loop.training_loop import TrainingLoop
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.policy_core import PolicyCore
from shared.messages import decode_scored_group
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train
from tests.trainer.played import FakeSender, PlayedServices, as_agents


def beyond_float32(label: str, branch: int) -> float:
    """Reward every second completion; in group 5, with a reward that is too large for float32."""
    return (1e300 if label == "00000005" else 1.0) * (branch % 2)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return small_config(tmp_path, tiny_model)


async def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_everything_for_a_post_mortem(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """Groups 4 and 5 make the third step. Two rewards of group 5 are larger than any float32."""
    await create(redis, config.model_copy(update={"scale_rewards": "none"}), tmp_path)
    played = PlayedServices(redis, reward=beyond_float32)

    with pytest.raises(ExceptionGroup) as caught:
        await train(redis, played=played, sender=FakeSender(redis))

    (error,) = caught.value.exceptions
    assert isinstance(error, NonFiniteError)
    assert "the loss of step 3 is" in str(error)
    assert "post_mortem/step_00000003/report.json" in str(error)
    directory = tmp_path / "run" / "post_mortem" / "step_00000003"
    report = json.loads((directory / "report.json").read_text(), parse_constant=pytest.fail)
    assert (report["step"], report["policy_version"]) == (3, 2)
    assert report["group_ids"] == ["00000004", "00000005"]
    assert report["settings"]["learning_rate"] == 1e-3
    at_fault = [row for row in report["rows"] if row["fault"]]
    assert report["rollouts_at_fault"] == [row["rollout_id"] for row in at_fault]
    assert report["rollouts_at_fault"] == [f"00000005-{branch}" for branch in range(4)], "the mean has the same size"
    assert (at_fault[0]["advantage"], at_fault[0]["loss"]) == ("-inf", "inf")
    assert at_fault[0]["generator_logprobs"] == [-4.0, -4.0]
    assert all(math.isfinite(row["loss"]) for row in report["rows"] if not row["fault"])
    groups = {path.stem: decode_scored_group(path.read_bytes()) for path in (directory / "groups").iterdir()}
    assert {label: len(group.rollouts) for label, group in groups.items()} == {"00000004": 4, "00000005": 4}
    assert newest_ledger(tmp_path / "run")["trained"] == [[0, 3]], "the checkpoint of step 2 is as it was"


async def test_a_run_that_ends_within_a_batch_while_the_disk_is_full_leaves_no_checkpoint_of_half_the_batch(
    redis: Redis, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 4 train the second batch. The checkpoint of step 2 finds no room."""
    publish = CheckpointWriter.publish
    tried: list[int] = []

    def full_at_first(self: CheckpointWriter, pending: PendingCheckpoint) -> Path:
        tried.append(pending.step)
        if len(tried) == 1:
            self.discard(pending)
            raise CheckpointError("the disk is full") from OSError(errno.ENOSPC, "No space left on device")
        return publish(self, pending)

    def overflow_in_step_4(loop: TrainingLoop) -> None:
        def overflow(gradient: torch.Tensor) -> torch.Tensor:
            return torch.full_like(gradient, math.inf) if loop.core.policy_version == 3 else gradient

        cast("PolicyCore", loop.core).lm.model.embed_tokens.weight.register_hook(overflow)

    monkeypatch.setattr(CheckpointWriter, "publish", full_at_first)
    two_steps = {"steps_per_generation": 2, "max_steps": 8, "max_staleness": 3}
    await create(redis, config.model_copy(update=two_steps), tmp_path)

    with pytest.raises(ExceptionGroup) as caught:
        await train(redis, played=PlayedServices(redis), sender=FakeSender(redis), meddle=overflow_in_step_4)

    assert "The run ended at step 4; its last checkpoint is unchanged" in str(caught.value.exceptions[0])
    assert tried == [2]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("delta", [None, 4.0])
async def test_a_ratio_beyond_any_float_is_bounded_and_the_run_goes_on(
    delta: float | None, redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """Group 5 has tokens with a probability of e^-1e30, and is compared with the policy that sampled it."""
    around_the_sampler = {"use_decoupled_loss": False, "vllm_importance_sampling_correction": False, "delta": delta}
    await create(redis, config.model_copy(update=around_the_sampler), tmp_path)
    played = PlayedServices(redis)
    played.logprobs["00000005"] = -1e30

    ending, loop = await train(redis, played=played, sender=FakeSender(redis))

    assert ending == "finished"
    assert loop.ledger.num_trained == 12
    metrics = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["num_bounded_ratios"] for line in metrics] == [0, 0, 8, 0, 0, 0], "two tokens of four completions"
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in metrics)


async def test_weights_that_are_not_finite_are_named_as_the_cause(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)

    def poison(loop: TrainingLoop) -> None:
        cast("PolicyCore", loop.core).lm.model.norm.weight.data[3] = math.nan

    with pytest.raises(ExceptionGroup):
        await train(redis, played=PlayedServices(redis), sender=FakeSender(redis), meddle=poison)
    report = json.loads((tmp_path / "run" / "post_mortem" / "step_00000001" / "report.json").read_text())
    assert {row["fault"] for row in report["rows"]} == {"its logprobs under the policy in training are not finite"}
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


async def test_a_gradient_that_is_not_finite_is_traced_to_its_rollouts_although_every_loss_is_finite(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    # Correction weights may be 0. Without them, every row has a gradient.
    await create(redis, config.model_copy(update={"vllm_importance_sampling_correction": False}), tmp_path)

    def make_overflow(loop: TrainingLoop) -> None:
        """Make the gradient of one token's embedding infinite. Only rollouts with that token have such a gradient."""

        def overflow(gradient: torch.Tensor) -> torch.Tensor:
            return torch.where(gradient[6:7].abs().sum() > 0, torch.full_like(gradient, math.inf), gradient)

        cast("PolicyCore", loop.core).lm.model.embed_tokens.weight.register_hook(overflow)

    with pytest.raises(ExceptionGroup):
        await train(redis, played=PlayedServices(redis), sender=FakeSender(redis), meddle=make_overflow)
    report = json.loads((tmp_path / "run" / "post_mortem" / "step_00000001" / "report.json").read_text())
    assert report["rollouts_at_fault"] == [f"{label}-1" for label in report["group_ids"]], "branch 1 samples token 6"


async def test_a_rollout_with_several_faulty_rows_is_named_once_and_each_row_is_described(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    played.spoil = dict.fromkeys(("00000000", "00000001"), as_agents)

    def poison(loop: TrainingLoop) -> None:
        cast("PolicyCore", loop.core).lm.lm_head.weight.data.fill_(math.nan)

    with pytest.raises(ExceptionGroup):
        await train(redis, played=played, sender=FakeSender(redis), meddle=poison)
    report = json.loads((tmp_path / "run" / "post_mortem" / "step_00000001" / "report.json").read_text())
    assert report["rollouts_at_fault"] == [f"{label}-{branch}" for label in report["group_ids"] for branch in (1, 2, 3)]
    assert [row["num_tokens"] for row in report["rows"]] == [2, 3] * 6
    assert [row["policy_versions"] for row in report["rows"]] == [[[0, 0, 2, 0]], [[0, 0, 3, 0]]] * 6
    assert {row["completion"] for row in report["rows"]} == {"ASSISTANT\nb\n\nTOOL\nno"}
    assert report["divided_by"]["num_rollouts"] == 6


async def test_rows_whose_gradients_are_too_large_only_together_are_all_named(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"vllm_importance_sampling_correction": False}), tmp_path)

    def make_overflow(loop: TrainingLoop) -> None:
        """Make the gradient infinite if tokens 5 and 6 are trained in the same pass: branches 0 and 1 of a group."""

        def overflow(gradient: torch.Tensor) -> torch.Tensor:
            has_both = (gradient[5:7].abs().sum(1) > 0).all()
            return torch.where(has_both, torch.full_like(gradient, math.inf), gradient)

        cast("PolicyCore", loop.core).lm.model.embed_tokens.weight.register_hook(overflow)

    with pytest.raises(ExceptionGroup):
        await train(redis, played=PlayedServices(redis), sender=FakeSender(redis), meddle=make_overflow)
    report = json.loads((tmp_path / "run" / "post_mortem" / "step_00000001" / "report.json").read_text())
    first, second = report["group_ids"]
    assert report["rollouts_at_fault"] == [f"{first}-0", f"{first}-1", f"{second}-0", f"{second}-1"]
    together = "its gradient is not finite together with 1 other rows"
    assert {row["fault"] for row in report["rows"]} == {together, ""}
