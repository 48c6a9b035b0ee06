"""Evaluations use the streams of training, and do not affect what is trained."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.groups.schedule import RunLength
from services.trainer.intake.evaluation import Evaluations
from services.trainer.loop.training_loop import TrainingLoop
from services.trainer.push.push_result import PushResult
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.trainer.bookkeeping import FakeEncoder, FakeRows
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train, trained_groups
from tests.trainer.played import FakeSender, PlayedServices

EVERYTHING_TRAINED: dict[str, Any] = {"admitted": 12, "trained": [[0, 11]], "dropped": {}}


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    """Evaluate on five prompts with three completions each. One prompt is too long."""
    rows = tmp_path / "test.jsonl"
    prompts = ["b1=", "b2=", "b3=", "b" * 30, "b4="]
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return small_config(
        tmp_path,
        tiny_model,
        eval_dataset_name=str(rows),
        eval_steps=2,
        eval_on_start=True,
        num_generations_eval=3,
        max_prompt_length=8,
    )


def reward(label: str, branch: int) -> float:
    """Give every evaluation prompt (0, 1, 1), and every training group (0, 1, 0, 1)."""
    return float(branch > 0) if label.startswith("eval-") else float(branch % 2)


def evaluations(tmp_path: Path) -> list[dict[str, Any]]:
    return json_lines(tmp_path / "run" / "evaluations.jsonl")


async def logged_events(redis: Redis) -> list[str]:
    """Return the events that the run has sent."""
    entries: Any = await redis.xrange(RunKeys("run-test").events)
    return [json.loads(fields[b"data"])["message"] for _, fields in entries if fields[b"kind"] == b"log"]


async def test_an_evaluation_is_reported_under_trls_names_with_the_versions_that_sampled_it(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    ending, _ = await train(redis, played=PlayedServices(redis, reward=reward), sender=FakeSender(redis))
    assert ending == "finished"
    found = evaluations(tmp_path)
    assert found[0]["step"] == 0
    assert found[-1]["step"] == 6, "the last step is evaluated before the run ends"
    for line in found:
        assert line["eval_reward"] == pytest.approx(2 / 3)
        # Twelve rewards, eight of them 1: the variance is 8/12 * 4/12 * 12/11.
        assert line["eval_reward_std"] == pytest.approx((8 / 33) ** 0.5)
        assert line["eval_rewards/parity/mean"] == pytest.approx(2 / 3)
        assert line["eval_completions/mean_length"] == 2
        assert line["eval_policy_version/min"] >= line["step"]
        assert line["eval_policy_version/max"] <= 6
        counts = {name: line[f"eval_groups/{name}"] for name in ("done", "missing", "unusable")}
        assert counts == {"done": 4, "missing": 0, "unusable": 1}
    rows = json_lines(tmp_path / "run" / "evaluations" / "step_00000006.jsonl")
    assert [row["prompt"] for row in rows] == [prompt for prompt in ("b1=", "b2=", "b3=", "b4=") for _ in range(3)]


@pytest.mark.parametrize(
    ("eval_steps", "total_steps", "due"),
    [(2, 6, [2, 4, 6]), (13, 38, [13, 26, 38]), (50, 5, [5]), (None, 5, []), (1, 3, [1, 2, 3])],
)
def test_the_last_step_is_evaluated_too(eval_steps: int | None, total_steps: int, due: list[int]) -> None:
    """transformers: DefaultFlowCallback.on_step_end."""
    length = RunLength(total_steps)
    evaluations = unconnected(RunConfig.model_construct(eval_steps=eval_steps), length)
    found: list[int] = []
    for step in range(total_steps + 1):
        if evaluations.is_due(step):
            found.append(step)
            evaluations.begin(step)
            evaluations = unconnected(RunConfig.model_construct(eval_steps=eval_steps), length, last_step=step)
    assert found == due
    length.total_steps += 4
    assert evaluations.is_due(length.total_steps) == (eval_steps is not None), "the run was made longer"


def unconnected(config: RunConfig, length: RunLength, *, last_step: int | None = None) -> Evaluations:
    unused: Any = None
    return Evaluations(
        unused, keys=RunKeys("run-test"), config=config, rows=ThreeRows(), encoder=unused, incarnation=1,
        replica_id="trainer", length=length, last_step=last_step,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("eval_steps", "due"),
    [
        (None, "evaluation of step 0 is made"),
        (5, "evaluation of step 0 is made"),
        (2, "evaluations of steps 0 and 2 are made as one"),
    ],
)
def test_an_evaluation_of_step_0_without_a_result_is_made_after_a_restart(eval_steps: int | None, due: str) -> None:
    config = RunConfig.model_construct(eval_steps=eval_steps, eval_on_start=True)
    evaluations = unconnected(config, RunLength(6))
    assert evaluations.is_due(3)
    reason = "because a restart or a pause interrupted the evaluation of step 0"
    assert evaluations.begin(3) == f"the {due} at step 3, on its policy, {reason}"
    evaluations = unconnected(config, RunLength(6), last_step=3)
    assert not evaluations.is_due(3)
    assert unconnected(config, RunLength(6)).begin(0) == ""


async def test_the_end_of_a_run_is_evaluated_although_it_is_no_multiple_of_eval_steps(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"eval_steps": 5, "eval_on_start": False}), tmp_path)
    ending, _ = await train(redis, played=PlayedServices(redis, reward=reward), sender=FakeSender(redis))
    assert ending == "finished"
    assert [line["step"] for line in evaluations(tmp_path)][-1] == 6


async def test_nothing_that_is_trained_knows_of_evaluations(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    await train(redis, played=PlayedServices(redis, reward=reward), sender=FakeSender(redis))
    keys = RunKeys("run-test")
    assert newest_ledger(tmp_path / "run") == EVERYTHING_TRAINED
    assert sorted(number for groups in trained_groups(tmp_path / "run").values() for number in groups) == [*range(12)]
    for stream in (keys.prompts, keys.completions, keys.scored):
        assert await redis.xlen(stream) == 0
        assert await redis.scard(keys.seen(stream)) == 0
    assert await redis.hlen(keys.started) == 0


async def test_training_goes_on_while_an_evaluation_is_under_way_and_a_later_one_waits_for_it(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """The evaluation of step 0 is kept back until step 5 was pushed. Meanwhile two more become due."""
    await create(redis, config, tmp_path)
    played, sender = PlayedServices(redis, reward=reward), FakeSender(redis)
    played.keep_back = lambda label: label.startswith("eval-")

    async def let_go() -> None:
        await sender.reached(5)
        played.keep_back = lambda label: False
        released = PlayedServices(redis, reward=reward)  # reads what the first one has left
        await released.play()

    releasing = asyncio.create_task(let_go(), name="let go")
    ending, _ = await train(redis, played=played, sender=sender)
    releasing.cancel()
    assert ending == "finished"
    assert [line["step"] for line in evaluations(tmp_path)] in ([0, 5, 6], [0, 6])
    assert evaluations(tmp_path)[0]["eval_groups/done"] == 4

    # The log says that the evaluations of steps 2 and 4 were skipped, and why.
    at, due, num_skipped = (5, "2 and 4", 1) if len(evaluations(tmp_path)) == 3 else (6, "2, 4 and 6", 2)
    assert [line["eval_skipped"] for line in evaluations(tmp_path)][:2] == [0, num_skipped]
    (said,) = [message for message in await logged_events(redis) if message.startswith("the evaluation")]
    assert said == (
        f"the evaluations of steps {due} are made as one at step {at}, on its policy, because the evaluation of step 0 "
        "was still running. Raise eval_steps, or lower max_eval_prompts or num_generations_eval"
    )


async def test_a_group_of_an_evaluation_that_is_buried_is_counted_as_missing(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis, reward=reward)
    played.bury = {"eval-0001-00000000-00000001"}
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert {name: evaluations(tmp_path)[0][f"eval_groups/{name}"] for name in ("done", "missing")} == {
        "done": 3,
        "missing": 1,
    }
    assert loop.ledger.dropped_by_reason() == {}


async def test_an_evaluation_of_which_nothing_comes_in_is_given_up_after_its_deadline(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"eval_steps": None}), tmp_path)
    played = PlayedServices(redis, reward=reward)
    played.keep_back = lambda label: label.startswith("eval-") and label.endswith("2")

    def impatient(loop: TrainingLoop) -> None:
        loop.intake.evaluations.idle_s = 3.0

    ending, _ = await train(redis, played=played, sender=FakeSender(redis), meddle=impatient)
    assert ending == "finished"
    (line,) = evaluations(tmp_path)
    assert (line["eval_groups/done"], line["eval_groups/missing"]) == (3, 1)


@pytest.mark.parametrize(("options", "idle_s"), [({}, 600.0), ({"agent": "my_agent:run"}, 3600.0)])
def test_an_evaluation_has_more_patience_with_rollouts_of_agents(options: dict[str, Any], idle_s: float) -> None:
    unused: Any = None
    evaluations = Evaluations(
        unused, keys=RunKeys("run-test"), config=RunConfig.model_construct(**options), rows=None, encoder=unused,
        incarnation=1, replica_id="trainer", length=RunLength(8), last_step=None,
    )  # fmt: skip
    assert evaluations.idle_s == idle_s


async def test_while_a_user_pauses_a_run_its_evaluation_sends_no_prompts_and_its_deadline_does_not_run(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    evaluations = Evaluations(
        redis, keys=run_keys, config=run_config, rows=ThreeRows(), encoder=FakeEncoder(), incarnation=0,
        replica_id="trainer", length=RunLength(8), last_step=None,
    )  # fmt: skip
    evaluations.idle_s = 0.0
    evaluations.begin(0)
    for _ in range(3):
        assert await evaluations.go_on([], may_send=False) is None
    assert await redis.xlen(run_keys.prompts) == 0
    evaluations.idle_s = 60.0
    assert await evaluations.go_on([]) is None
    assert await redis.xlen(run_keys.prompts) == 3
    evaluations.idle_s = 0.0
    assert await evaluations.go_on([], may_send=False) is None
    result = await evaluations.go_on([])
    assert result is not None
    assert result.metrics["eval_groups/missing"] == 3


class ThreeRows(FakeRows):
    def __len__(self) -> int:
        return 3


class LateGenerator(FakeSender):
    """A fleet without a generator until it was asked four times, over more than a second."""

    def __init__(self, redis: Redis, loaded: asyncio.Event) -> None:
        super().__init__(redis)
        self._num_asked, self._loaded = 0, loaded

    async def needs_push(self) -> bool:
        return not self._loaded.is_set()

    async def push(self, *arguments: Any, **options: Any) -> PushResult:
        self._num_asked += 1
        if self._num_asked == 4:
            self._loaded.set()
        pushed = await super().push(*arguments, **options)
        return pushed if self._loaded.is_set() else dataclasses.replace(pushed, replies={})


class LateServices(PlayedServices):
    """Services whose generator has to load its model first."""

    def __init__(self, redis: Redis, loaded: asyncio.Event) -> None:
        super().__init__(redis, reward=reward)
        self._loaded = loaded

    async def play(self) -> None:
        await self._loaded.wait()
        await super().play()


async def test_the_deadline_of_an_evaluation_does_not_run_while_there_is_no_generator(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"eval_steps": None}), tmp_path)
    loaded = asyncio.Event()
    patience: list[asyncio.Task[None]] = []

    def impatient(loop: TrainingLoop) -> None:
        loop.intake.evaluations.idle_s = 0.2
        patience.append(asyncio.create_task(be_patient(loop), name="patience"))

    async def be_patient(loop: TrainingLoop) -> None:
        await loaded.wait()
        loop.intake.evaluations.idle_s = 60.0

    await train(redis, played=LateServices(redis, loaded), sender=LateGenerator(redis, loaded), meddle=impatient)
    (line,) = evaluations(tmp_path)
    assert (line["eval_groups/done"], line["eval_groups/missing"]) == (4, 0)


async def test_a_restart_within_an_evaluation_repeats_it_and_takes_nothing_of_the_old_one(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"eval_steps": 5}), tmp_path)
    played, sender, terminate = PlayedServices(redis, reward=reward), FakeSender(redis), asyncio.Event()
    played.keep_back = lambda label: label.startswith("eval-0001-")
    first = asyncio.create_task(train(redis, played=played, sender=sender, terminate=terminate), name="first")
    await sender.reached(3)
    terminate.set()
    assert (await first)[0] == "terminated"
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()

    # The groups of the first incarnation are completed and scored now, with rewards that would be noticed.
    second = PlayedServices(redis, reward=lambda label, branch: 9.0 if "eval-0001-" in label else reward(label, branch))
    ending, _ = await train(redis, played=second, sender=FakeSender(redis))

    assert ending == "finished"
    assert all(line["eval_reward"] == pytest.approx(2 / 3) for line in evaluations(tmp_path))
    resumed_at = int(evaluations(tmp_path)[0]["step"])
    assert 3 <= resumed_at < 5
    moved = f"the evaluation of step 0 is made at step {resumed_at}, on its policy, because "
    assert f"{moved}a restart or a pause interrupted the evaluation of step 0" in await logged_events(redis)
    assert newest_ledger(tmp_path / "run") == EVERYTHING_TRAINED
    assert await redis.xlen(RunKeys("run-test").scored) == 0, "the remaining groups of the old evaluation are acked"
