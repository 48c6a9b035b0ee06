"""The loop with a real model, a real Redis and real checkpoints; generator and rewarder are played by hand-offs."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.trainer.checkpoints.checkpoint import newest_valid
from services.trainer.loop.training_loop import TrainingLoop
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.policy_core import PolicyCore
from shared.errors import PushError
from shared.messages import decode_scored_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train, trained_groups
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices, as_agents


def beyond_float32(label: str, branch: int) -> float:
    """Reward every second completion; in group 5, with a reward that is too large for float32."""
    return (1e300 if label == "00000005" else 1.0) * (branch % 2)


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return small_config(tmp_path, tiny_model)


async def test_a_run_trains_every_admitted_group_once_and_pushes_every_version(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    sender, played = FakeSender(redis), PlayedServices(redis)

    ending, _ = await train(redis, played=played, sender=sender)

    assert ending == "finished"
    assert sender.versions == [0, 1, 2, 3, 4, 5, 6]
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
    steps = trained_groups(tmp_path / "run")
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert sorted(number for groups in steps.values() for number in groups) == list(range(12))
    assert await redis.xlen(RunKeys(RUN_ID).scored) == 0, "everything is acked at the end"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["reward"] == 0.5 for line in metrics), "two of four completions get 1"
    assert max(line["staleness/max"] for line in metrics) <= 1


async def test_a_batch_is_computed_beside_the_push_and_neither_stepped_nor_followed_by_groups_before_its_end(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """A step would change the weights that are being pushed. A group would be sampled by older ones."""
    await create(redis, config, tmp_path)  # with a checkpoint, which waits for the push, at every second step
    sender, may_end, accumulated = FakeSender(redis), asyncio.Event(), asyncio.Event()
    kept: list[TrainingLoop] = []

    async def hold_version_3(version: int) -> None:
        if version == 3:
            await may_end.wait()

    def watch(loop: TrainingLoop) -> None:
        kept.append(loop)
        core: Any = loop.core
        accumulate, event_loop = core.accumulate, asyncio.get_running_loop()

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = accumulate(*args, **kwargs)
            if core.policy_version == 3:
                event_loop.call_soon_threadsafe(accumulated.set)
            return result

        core.accumulate = noted

    sender.may_push = hold_version_3
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender, meddle=watch), name="run")
    async with asyncio.timeout(60):
        await accumulated.wait()
    (loop,) = kept
    admitted = loop.ledger.admitted
    done, _ = await asyncio.wait({run}, timeout=1.0)
    assert not done
    assert (loop.core.policy_version, loop.ledger.admitted, sender.versions) == (3, admitted, [0, 1, 2])
    may_end.set()
    assert (await run)[0] == "finished"
    assert sender.versions == [0, 1, 2, 3, 4, 5, 6]


async def test_a_push_that_finds_diverged_weights_ends_the_run_while_the_next_batch_is_computed(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"save_steps": 1}), tmp_path)
    sender, checkpoints = FakeSender(redis), tmp_path / "run" / "checkpoints"

    async def fail_the_third(version: int) -> None:
        if version == 2:
            await eventually(lambda: newest_valid(checkpoints) is not None)  # it would be cut off by the failure
            raise PushError("they have diverged")

    sender.may_push = fail_the_third
    with pytest.raises(BaseExceptionGroup) as raised:
        await train(redis, played=PlayedServices(redis), sender=sender)
    assert raised.group_contains(PushError, match="they have diverged")
    checkpoint = newest_valid(checkpoints)
    assert checkpoint is not None
    assert checkpoint.step == 1, "no checkpoint has the diverged weights"


async def test_a_run_that_is_paused_during_a_push_admits_nothing_after_it(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    sender, may_end, begun = FakeSender(redis), asyncio.Event(), asyncio.Event()
    kept: list[TrainingLoop] = []

    async def hold_the_first(version: int) -> None:
        if version == 0:
            begun.set()
            await may_end.wait()

    sender.may_push = hold_the_first
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender, meddle=kept.append), name="run")
    async with asyncio.timeout(60):
        await begun.wait()
        (loop,) = kept
        await RunStore(redis).ask_to(RUN_ID, "pause")
        while loop.intake.pause.by != "user":  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
        may_end.set()
        await sender.reached(0)
        while loop.outflow.is_pushing:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
    assert loop.ledger.admitted == 0
    await RunStore(redis).ask_to(RUN_ID, "run")
    assert (await run)[0] == "finished"


async def test_a_user_who_pauses_a_run_gets_a_checkpoint_of_its_weights(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"save_steps": 1000}), tmp_path)
    sender, kept = FakeSender(redis), list[TrainingLoop]()
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender, meddle=kept.append), name="run")
    async with asyncio.timeout(60):
        await sender.reached(1)
        await RunStore(redis).ask_to(RUN_ID, "pause")
        checkpoints = tmp_path / "run" / "checkpoints"
        await eventually(lambda: newest_valid(checkpoints) is not None)
    checkpoint = newest_valid(checkpoints)
    assert checkpoint is not None
    assert kept[0].core.policy_version == checkpoint.step > 0
    await RunStore(redis).ask_to(RUN_ID, "run")
    assert (await run)[0] == "finished"


async def test_an_evaluation_begins_after_the_push_of_its_version(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} ="}) + "\n" for number in range(4)))
    update = {"eval_dataset_name": str(prompts), "eval_steps": 2}
    await create(redis, config.model_copy(update=update), tmp_path)
    sender = FakeSender(redis)

    async def take_a_while(_: int) -> None:
        await asyncio.sleep(0.2)

    sender.may_push = take_a_while
    assert (await train(redis, played=PlayedServices(redis), sender=sender))[0] == "finished"
    lines = json_lines(tmp_path / "run" / "evaluations.jsonl")
    assert lines
    assert all(line["eval_policy_version/min"] >= line["step"] for line in lines)


async def test_the_reason_for_the_transport_is_logged_once(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    sender = FakeSender(redis)
    await train(redis, played=PlayedServices(redis), sender=sender)
    assert sender.slept_after == []
    entries: Any = await redis.xrange(RunKeys(RUN_ID).events)  # nullable only in the stubs
    events: list[tuple[bytes, bytes]] = [(fields[b"kind"], fields[b"data"]) for _, fields in entries]
    told = [json.loads(data)["message"] for kind, data in events if kind == b"log" and b"weights travel" in data]
    assert told == ["weights travel over gloo: there is no GPU"]


async def test_in_sleep_mode_generators_sleep_from_each_batch_to_the_push_of_its_weights(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    sleeping = {"vllm_enable_sleep_mode": True, "push_staging": "none", "max_staleness": 0, "weight_transport": "ipc"}
    await create(redis, config.model_copy(update=sleeping), tmp_path)
    sender = FakeSender(redis)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=sender)
    assert ending == "finished"
    assert sender.versions == [0, 1, 2, 3, 4, 5, 6]
    assert sender.slept_after == [0, 1, 2, 3, 4, 5]


async def test_no_more_groups_are_in_flight_than_admission_allows(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    await train(redis, played=played, sender=FakeSender(redis))
    assert 1 <= played.max_in_flight <= (config.max_staleness + 1) * config.groups_per_step


async def test_a_terminated_trainer_goes_on_where_it_was(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    sender, played, terminate = FakeSender(redis), PlayedServices(redis), asyncio.Event()
    first = asyncio.create_task(train(redis, played=played, sender=sender, terminate=terminate), name="first")
    await sender.reached(3)
    terminate.set()
    assert (await first)[0] == "terminated"

    second = FakeSender(redis)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=second)

    assert ending == "finished"
    assert second.versions[0] >= 3, "the successor starts from the checkpoint of its predecessor"
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
    assert sorted(number for groups in trained_groups(tmp_path / "run").values() for number in groups) == list(
        range(12)
    )


async def test_a_stopped_run_drops_what_is_in_flight_with_that_reason(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"max_steps": 500}), tmp_path)
    sender = FakeSender(redis)
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender), name="run")
    await sender.reached(2)
    await RunStore(redis).ask_to(RUN_ID, "stop")
    ending, loop = await run
    assert ending == "stopped"
    ledger = loop.ledger
    assert ledger.num_in_flight == 0
    assert ledger.admitted == ledger.num_trained + ledger.num_dropped
    assert set(ledger.dropped_by_reason()) <= {"run_stopped"}


async def test_a_run_whose_groups_are_all_buried_is_paused_and_says_why(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """It would otherwise bury its whole data set, over and over."""
    await create(redis, config.model_copy(update={"reward_failure_window": 4}), tmp_path)
    played, kept = PlayedServices(redis), list[TrainingLoop]()
    played.bury = {f"{number:08d}" for number in range(1000)}
    run = asyncio.create_task(train(redis, played=played, sender=FakeSender(redis), meddle=kept.append), name="run")
    async with asyncio.timeout(60):
        while not kept or kept[0].intake.pause.by != "rewards":  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert record.pause is not None
    assert record.pause.reason.endswith("they became dead letters, the last because it kills the engine")
    assert kept[0].ledger.admitted < 100
    played.bury = set()
    await RunStore(redis).ask_to(RUN_ID, "run")
    assert (await run)[0] == "finished"


async def test_a_buried_group_gives_its_place_to_another(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    played.bury = {"00000003"}
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert loop.ledger.dropped_by_reason() == {"dead_letter": 1}
    assert (loop.ledger.admitted, loop.ledger.num_trained) == (13, 12)


async def test_groups_without_signal_are_dropped_if_the_run_says_so(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"drop_zero_std_groups": True}), tmp_path)
    played = PlayedServices(redis, reward=lambda label, branch: 1.0 if int(label) % 3 == 0 else float(branch % 2))
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert loop.ledger.num_trained == 12
    dropped = loop.ledger.dropped_by_reason()["zero_std"]
    assert loop.ledger.admitted == 12 + dropped
    assert dropped == len([n for n in range(loop.ledger.admitted) if n % 3 == 0])


async def test_a_batch_of_several_steps_trains_each_minibatch_as_often_as_asked_and_pushes_once(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """Two minibatches of 2 groups in 2 passes: 4 steps per batch, 3 batches of 4 groups."""
    several = {"num_iterations": 2, "steps_per_generation": 2, "max_staleness": 7, "max_steps": 12, "save_steps": 3}
    await create(redis, config.model_copy(update=several), tmp_path)
    sender = FakeSender(redis)

    ending, loop = await train(redis, played=PlayedServices(redis), sender=sender)

    assert ending == "finished"
    assert sender.versions == [0, 4, 8, 12], "weights are pushed only between batches"
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
    steps = trained_groups(tmp_path / "run")
    assert list(steps) == [1, 2, 5, 6, 9, 10], "the rollouts of a minibatch are logged in its first pass"
    assert sorted(number for groups in steps.values() for number in groups) == list(range(12))
    assert all(len(groups) == 2 for groups in steps.values())
    metrics = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert ["reward" in line for line in metrics] == [True, False, False, False] * 3
    assert max(line["staleness/max"] for line in metrics) <= 7
    assert metrics[3]["staleness/min"] == 3, "the fourth step of the first batch trains what version 0 sampled"
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert checkpoints == ["step_00000008", "step_00000012"], "at batch ends, when a multiple of save_steps was passed"
    assert loop.ledger.num_in_flight == 0


async def test_the_first_pass_over_a_batch_is_on_policy_and_later_ones_are_not(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """The proximal policy is the one at the start of the batch, so its ratio is 1 only in the first step of a batch.

    Of the 4 completions of a group, every second is right, so half of the tokens have advantages of each sign.
    """
    several = {"num_iterations": 3, "max_staleness": 2, "max_steps": 6, "epsilon": 1e-6, "learning_rate": 1e-2}
    await create(redis, config.model_copy(update=several), tmp_path)
    await train(redis, played=PlayedServices(redis), sender=FakeSender(redis))
    clipped = [line["clip_ratio/region_mean"] > 0 for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert clipped == [False, True, True] * 2, "a clip range this narrow catches every ratio that is not 1"


async def test_a_run_that_ends_within_a_batch_samples_and_trains_what_the_steps_left_use(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """Batches of 3 minibatches of 2 groups; 4 steps are one batch and one minibatch: 8 groups."""
    several = {"steps_per_generation": 3, "max_staleness": 5, "max_steps": 4, "save_steps": 100}
    await create(redis, config.model_copy(update=several), tmp_path)
    sender = FakeSender(redis)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=sender)
    assert ending == "finished"
    assert sender.versions == [0, 3, 4]
    assert newest_ledger(tmp_path / "run") == {"admitted": 8, "trained": [[0, 7]], "dropped": {}}
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()


@pytest.mark.parametrize("how", ["stop", "terminate"])
async def test_whoever_ends_a_run_within_a_batch_gets_the_whole_batch(
    how: str, redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    several = {"num_iterations": 4, "max_staleness": 3, "max_steps": 400, "save_steps": 1000}
    await create(redis, config.model_copy(update=several), tmp_path)
    sender, terminate = FakeSender(redis), asyncio.Event()
    run = asyncio.create_task(
        train(redis, played=PlayedServices(redis), sender=sender, terminate=terminate), name="run"
    )
    await sender.reached(4)
    if how == "stop":
        await RunStore(redis).ask_to(RUN_ID, "stop")
    else:
        terminate.set()
    ending, loop = await run
    assert ending == ("stopped" if how == "stop" else "terminated")
    last = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert last % 4 == 0
    assert last == sender.versions[-1] == json_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert loop.ledger.num_trained == last // 2


async def test_the_kl_to_the_reference_model_is_zero_before_the_first_step_and_not_after(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"beta": 0.1, "max_steps": 2}), tmp_path)
    await train(redis, played=PlayedServices(redis), sender=FakeSender(redis))
    first, second = (line["kl"] for line in json_lines(tmp_path / "run" / "metrics.jsonl"))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-6


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
