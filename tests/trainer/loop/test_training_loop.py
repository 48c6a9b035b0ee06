"""The loop with a real model, a real Redis and real checkpoints; generator and rewarder are played by hand-offs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoints.checkpoint import newest_valid
from services.trainer.loop.resumed import resumed_in_words
from services.trainer.loop.training_loop import TrainingLoop
from shared.errors import PushError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_restarts import RestartWatch
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train, trained_groups
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    return small_config(tmp_path, tiny_model)


async def test_a_stream_may_have_more_unusable_rows_in_a_row_than_are_looked_at_at_a_time(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    streamed = {"dataset_streaming": True, "shuffle_dataset": False, "max_prompt_length": 8, "max_steps": 2}
    config = small_config(tmp_path, tiny_model, **streamed)
    prompts = ["a" * 40] * 1100 + [f"a{number}=" for number in range(7)] * 3
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    await create(redis, config, tmp_path)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=FakeSender(redis))
    assert ending == "finished"
    dropped = newest_ledger(tmp_path / "run")["dropped"]
    assert dropped["prompt_too_long"] == [[0, 1099]]


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


async def test_a_run_goes_on_after_redis_has_lost_the_first_required_version(
    redis: Redis, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgotten(FakeSender):
        """Its first push requires nothing in the end."""

        is_lost = True

        async def require_pushed(self) -> None:
            if self.is_lost:
                self.is_lost = not self.versions
            else:
                await super().require_pushed()

    class LikeSessions(PlayedServices):
        """Claims no prompt without a required version."""

        async def play(self) -> None:
            await eventually(lambda: redis.exists(self.keys.required_version))
            await super().play()

    async def has_restarted(self: RestartWatch) -> bool:
        return True

    monkeypatch.setattr(RestartWatch, "has_restarted", has_restarted)
    await create(redis, config, tmp_path)
    ending, _ = await train(redis, played=LikeSessions(redis), sender=Forgotten(redis))
    assert ending == "finished"


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


@pytest.mark.parametrize(
    ("step", "last", "ending"),
    [
        (40, 47, "step 40; steps 41 to 47 are trained again"),
        (40, 41, "step 40; step 41 is trained again"),
        (40, 40, "40"),
    ],
)
def test_watchers_are_told_which_steps_are_repeated(step: int, last: int, ending: str) -> None:
    assert resumed_in_words(step, last).endswith(ending)


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


async def test_a_buried_group_is_reported_once_over_all_trainers_of_the_run(
    redis: Redis, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.intake.external_changes._EVERY_S", 0.0)
    await create(redis, config, tmp_path)
    sender, terminate = FakeSender(redis), asyncio.Event()

    async def end_at_version_3(version: int) -> None:
        if version == 3:
            terminate.set()

    sender.may_push = end_at_version_3
    played = PlayedServices(redis)
    played.bury = {"00000001"}
    assert (await train(redis, played=played, sender=sender, terminate=terminate))[0] == "terminated"
    assert newest_ledger(tmp_path / "run")["dropped"] == {"dead_letter": [[1, 1]]}
    assert (await train(redis, played=PlayedServices(redis), sender=FakeSender(redis)))[0] == "finished"

    entries: Any = await redis.xrange(RunKeys(RUN_ID).events)
    told = [json.loads(fields[b"data"]).get("message", "") for _, fields in entries]
    assert [message for message in told if "was buried" in message] == [
        "group 00000001 was buried: it kills the engine"
    ]


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
