"""A loop that looks for its best checkpoint waits for each evaluation, keeps the best, and ends early.

Generator and rewarder are played, and rewards of evaluations are chosen by hand. tests/trainer/test_best_model.py has
the same with the real trainer process, which is killed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from services.trainer.groups.ledger import RUN_ENDED
from services.trainer.loop.training_loop import TrainingLoop
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


def rewarded(values: dict[int, float | None]) -> Callable[[str, int], float | None]:
    """Return rewards: of an evaluation's completions by its step, 0.5 on average for all others."""

    def reward(label: str, branch: int) -> float | None:
        return values.get(int(label.split("-")[2]), 0.5) if label.startswith("eval-") else float(branch % 2)

    return reward


async def make_run(redis: Redis, directory: Path, model: Path, **settings: Any) -> Path:
    """Create a run that is evaluated every second step; return its directory."""
    prompts = directory / "eval.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} ="}) + "\n" for number in range(3)))
    plain: dict[str, Any] = {"eval_dataset_name": str(prompts), "eval_steps": 2, "save_steps": 3, "save_total_limit": 1}
    await create(redis, small_config(directory, model, **plain | settings), directory)
    return directory / "run"


def kept_steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


async def test_a_run_ends_early_with_its_best_checkpoint_kept(redis: Redis, tmp_path: Path, tiny_model: Path) -> None:
    run_dir = await make_run(redis, tmp_path, tiny_model, max_steps=40, early_stopping_patience=2)
    played = PlayedServices(redis, reward=rewarded({2: 0.25, 4: 0.75, 6: 0.75, 8: 0.5}))
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert (ending, loop.core.policy_version, loop.stops_early) == ("finished", 8, True)
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert (record.progress.step, record.progress.max_steps, record.progress.is_ending) == (8, 40, True)
    assert kept_steps(run_dir) == [4, 8]
    lines = json_lines(run_dir / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for line in lines:
        assert line["eval_policy_version/min"] == line["eval_policy_version/max"] == line["step"]
    ledger = newest_ledger(run_dir)
    assert set(ledger["dropped"]) <= {RUN_ENDED}
    num_dropped = sum(last - first + 1 for ranges in ledger["dropped"].values() for first, last in ranges)
    assert ledger["admitted"] == 16 + num_dropped, "8 steps trained two groups each"
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert record.progress.best is not None
    assert (record.progress.best.step, record.progress.best.value) == (4, 0.75)
    assert record.progress.epoch == 8 * 2 / 20
    assert record.progress.num_tokens > 0


async def test_the_progress_says_that_training_waits_for_an_evaluation(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    await make_run(redis, tmp_path, tiny_model, max_steps=4, early_stopping_patience=5)
    seen: list[tuple[str, bool, bool]] = []

    async def look(loop: TrainingLoop, when: str) -> None:
        await loop.reporting.write_progress()
        record = await RunStore(redis).get(RUN_ID)
        assert record is not None
        seen.append((when, record.progress.is_evaluating, record.progress.is_ending))

    def looks(loop: TrainingLoop) -> None:
        save, log_step = loop.outflow.save_for_evaluation, loop.reporting.step

        async def save_for_evaluation() -> None:
            await look(loop, "evaluation")
            await save()

        async def step(*arguments: Any) -> None:
            await look(loop, "step")
            await log_step(*arguments)

        changed: Any = loop
        changed.outflow.save_for_evaluation, changed.reporting.step = save_for_evaluation, step

    await train(redis, played=PlayedServices(redis), sender=FakeSender(redis), meddle=looks)
    last = [("step", False, True), ("evaluation", True, True)]
    assert set(seen) == {("evaluation", True, False), ("step", False, False), *last}
    assert list(dict.fromkeys(look for look in seen if look[2])) == last
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert record.progress.is_ending
    stuck = replace(record.progress, is_evaluating=True, disk_full="space", num_left_out=1, left_out={"g": "late"})
    await RunStore(redis).write_progress(RUN_ID, stuck)
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    await RunStore(redis).write_starting(record, "loading the model")
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    progress = record.progress
    assert (progress.is_evaluating, progress.is_ending, progress.disk_full) == (False, False, ""), "it has only started"
    assert (record.progress.num_left_out, record.progress.left_out) == (0, {})
    assert record.progress.step == 4


async def test_a_trainer_that_resumes_counts_on_and_keeps_the_best_of_before(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = await make_run(redis, tmp_path, tiny_model, max_steps=40, early_stopping_patience=2)
    played = PlayedServices(redis, reward=rewarded({2: 0.75, 4: 0.5, 6: 0.25}))

    class KilledError(Exception):
        """As a process that is killed, this does nothing at the end."""

    def dies_after_4(loop: TrainingLoop) -> None:
        log_evaluation: Any = loop.reporting.evaluation

        async def evaluation(result: Any) -> None:
            await log_evaluation(result)
            if result.step == 4:
                raise KilledError

        loop.reporting.evaluation = evaluation  # type: ignore[method-assign]

    try:
        await train(redis, played=played, sender=FakeSender(redis), meddle=dies_after_4)
    except* KilledError:
        pass
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert (ending, loop.core.policy_version) == ("finished", 6)
    assert kept_steps(run_dir) == [2, 6]
    assert [line["step"] for line in json_lines(run_dir / "evaluations.jsonl")] == [2, 4, 6]
    assert loop.best is not None
    assert (loop.best.step, loop.best.num_without_improvement) == (2, 2)
    again, resumed = await train(redis, played=played, sender=FakeSender(redis))
    assert (again, resumed.core.policy_version) == ("finished", 6), "it ends again, without a further step"


async def test_the_last_step_and_the_weights_before_the_first_can_be_the_best(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = await make_run(redis, tmp_path, tiny_model, load_best_model_at_end=True, eval_on_start=True)
    played = PlayedServices(redis, reward=rewarded({0: 0.5, 2: 0.25, 4: 0.25, 6: 1.0}))
    steps: list[int] = []

    def note(loop: TrainingLoop) -> None:
        log_evaluation: Any = loop.reporting.evaluation

        async def evaluation(result: Any) -> None:
            await log_evaluation(result)
            steps.extend([0] if (run_dir / "checkpoints" / "step_00000000").is_dir() else [])

        loop.reporting.evaluation = evaluation  # type: ignore[method-assign]

    ending, loop = await train(redis, played=played, sender=FakeSender(redis), meddle=note)
    assert ending == "finished"
    assert steps == [0, 0, 0, 0], "the weights of step 0 are kept while they are the best"
    assert loop.best is not None
    assert loop.best.step == 6
    assert kept_steps(run_dir) == [0, 6], "the best of before goes when the next checkpoint is written"
    assert not loop.stops_early


async def test_an_evaluation_that_is_missing_a_prompt_does_not_decide_and_an_event_says_so(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = await make_run(redis, tmp_path, tiny_model, load_best_model_at_end=True)
    played = PlayedServices(redis, reward=rewarded({2: 0.25, 4: 1.0, 6: 0.5}))
    played.bury = {"eval-0001-00000004-00000001"}
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert [line["eval_groups/missing"] for line in json_lines(run_dir / "evaluations.jsonl")] == [0, 1, 0]
    assert loop.best is not None
    assert (loop.best.step, loop.best.value) == (6, 0.5)
    events: Any = await redis.xrange(RunKeys(RUN_ID).events)
    said = (
        "the evaluation of step 4 has no score for 1 of its prompts, so it counts neither for the best checkpoint nor "
        "for early stopping"
    )
    assert sum(said.encode() in b"".join(fields.values()) for _, fields in events) == 1


async def test_a_run_that_looks_for_no_best_checkpoint_trains_beside_its_evaluations_and_saves_nothing_more(
    redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    run_dir = await make_run(redis, tmp_path, tiny_model, save_total_limit=9)
    played = PlayedServices(redis, reward=rewarded({2: 0.25}))
    played.keep_back = lambda label: label.startswith("eval-") and label.split("-")[2] == "00000002"
    ended: list[int] = []

    def lose(loop: TrainingLoop) -> None:
        loop.intake.evaluations.idle_s = 1.0  # no group of the evaluation of step 2 arrives
        assert loop.best is None
        log_evaluation: Any = loop.reporting.evaluation

        async def evaluation(result: Any) -> None:
            await log_evaluation(result)
            ended.append(loop.core.policy_version)

        loop.reporting.evaluation = evaluation  # type: ignore[method-assign]

    ending, _ = await train(redis, played=played, sender=FakeSender(redis), meddle=lose)
    assert ending == "finished"
    assert ended[0] > 2, "training went on beside the evaluation of step 2"
    assert kept_steps(run_dir) == [3, 6]
