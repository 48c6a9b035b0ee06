"""Reward models without their processes: the test provides the processes' answers. No torch."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall, Verdict
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models import reward_models, served_model
from services.rewarder.reward_models.model_frames import Described, Loaded, Reply, Request, Score, Scored, Working
from services.rewarder.reward_models.model_process import ModelDiedError, ModelProcess
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels
from shared.service.logs import JsonLines, about
from shared.user_code.worker_frames import Refused
from tests.eventually import eventually

pytestmark = pytest.mark.unit

CALL = RewardCall(prompts=["p"], completions=["c"], columns={})
LOADED: list[Reply] = [Described("Fake", None), Loaded("Fake", "v1", "cpu", "float32")]


class FakeProcess:
    """Gives the answers that a test sets."""

    pid = 1

    def __init__(self) -> None:
        self.sent: list[Request] = []
        self.replies: asyncio.Queue[Reply | Exception] = asyncio.Queue()

    def says(self, *replies: Reply | Exception) -> None:
        for reply in replies:
            self.replies.put_nowait(reply)

    def send(self, request: Request) -> None:
        self.sent.append(request)

    async def receive(self) -> Reply:
        reply = await self.replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def kill(self) -> int:
        return -9

    def scores(self) -> list[int]:
        return [request.id for request in self.sent if isinstance(request, Score)]


class Said(logging.Handler):
    """The log messages, each with the model that was its context."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(JsonLines().format(record)))


class Processes:
    """The started processes; ``failure`` is why none can be started."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.failure: Exception | None = None

    async def start(self) -> FakeProcess:
        if self.failure is not None:
            raise self.failure
        self.started.append(FakeProcess())
        return self.started[-1]

    async def newest(self, number: int) -> FakeProcess:
        await eventually(lambda: len(self.started) == number)
        return self.started[-1]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes()
    monkeypatch.setattr(ModelProcess, "start", made.start)
    monkeypatch.setattr(reward_models, "_NEEDED", ())
    return made


@pytest.fixture
async def models(processes: Processes) -> Any:
    models = RewardModels(ModelSettings(), metrics=RewardModelMetrics(CollectorRegistry()), in_use=tuple)
    yield models
    await models.close()


def start_call(models: RewardModels, name: str, *, timeout_s: float = 60.0) -> "asyncio.Task[tuple[Answer, float]]":
    return asyncio.create_task(cast("Any", models.call(name, CALL, timeout_s=timeout_s, lane="a")))


async def turn_the_loop() -> None:
    """Run all tasks as far as possible."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_deadline_does_not_run_while_the_model_is_loaded_again(
    models: RewardModels, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [start_call(models, "org/name") for _ in range(2)]
    first = await processes.newest(1)
    await eventually(lambda: first.scores() == [0, 1])
    # It begins with one round, takes the next, and dies; and so does the next process.
    first.says(*LOADED, Working([0], is_scoring=True))
    await turn_the_loop()
    first.says(Working([1], is_scoring=True), ModelDiedError("gone"))
    second = await processes.newest(2)
    await eventually(lambda: second.scores() == [0, 1])
    second.says(*LOADED, Working([1], is_scoring=True), ModelDiedError("gone"))
    third = await processes.newest(3)
    await eventually(lambda: third.scores() == [0])
    with pytest.raises(RewardFailure, match="died twice while it scored this: it was killed by SIGKILL"):
        await calls[1]
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 120.0)  # as timers measure it
    await turn_the_loop()
    assert not calls[0].done()
    third.says(*LOADED, Working([0], is_scoring=True), Scored(0, [Verdict("scored", 0.5)]))
    answer, seconds = await calls[0]
    assert answer.verdicts == [Verdict("scored", 0.5)]
    assert seconds < 60.0


async def test_a_model_whose_process_died_while_it_loaded_is_loaded_once_more(
    models: RewardModels, processes: Processes
) -> None:
    call = start_call(models, "org/name")
    (await processes.newest(1)).says(ModelDiedError("gone"))
    second = await processes.newest(2)
    second.says(*LOADED, Working([0], is_scoring=True), Scored(0, [Verdict("scored", 0.5)]))
    answer, _ = await call
    assert answer.verdicts == [Verdict("scored", 0.5)]


async def test_a_model_whose_processes_die_whenever_it_is_loaded_says_how(
    models: RewardModels, processes: Processes
) -> None:
    call = start_call(models, "org/name")
    (await processes.newest(1)).says(ModelDiedError("gone"))
    (await processes.newest(2)).says(ModelDiedError("gone"))
    with pytest.raises(RewardFailure, match="loaded org/name died, and so did the next: it was killed by SIGKILL"):
        await call
    assert len(processes.started) == 2


async def test_an_unexpected_failure_is_an_error_of_the_calls_and_not_an_endless_wait(
    models: RewardModels, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    processes.failure = RuntimeError("unforeseen")
    with pytest.raises(RewardFailure, match="RuntimeError: unforeseen") as caught:
        await start_call(models, "org/one")
    assert caught.value.outcome == "error"
    processes.failure = None
    call = start_call(models, "org/two")
    (await processes.newest(1)).says(*LOADED, Working([0], is_scoring=True), RuntimeError("unforeseen"))
    with pytest.raises(RewardFailure, match="RuntimeError: unforeseen"):
        await call
    assert len([record for record in caplog.records if record.exc_info]) == 2, "the log says where"


async def test_the_log_of_a_model_does_not_name_the_group_that_asked_first(
    models: RewardModels, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    said = Said()
    caplog.set_level(logging.INFO, logger=served_model.__name__)
    logger = logging.getLogger(served_model.__name__)
    logger.addHandler(said)
    try:
        with about(run_id="run-a", group_id="00000001"):
            first = start_call(models, "org/name")
        process = await processes.newest(1)
        process.says(*LOADED, Working([0], is_scoring=True), Scored(0, [Verdict("scored", 0.5)]))
        await first
        process.says(RuntimeError("unforeseen"))
        await eventually(lambda: any("failed to talk" in event["message"] for event in said.events))
    finally:
        logger.removeHandler(said)
    assert any("is loaded" in event["message"] for event in said.events)
    assert not [event for event in said.events if event.keys() & {"run_id", "group_id"}]


async def test_a_changed_directory_is_not_loaded_during_calls_and_a_check_reports_it(
    models: RewardModels, processes: Processes, tmp_path: Path
) -> None:
    name = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    call = start_call(models, name)
    first = await processes.newest(1)
    first.says(*LOADED)
    assert isinstance(await models.inspect(name), Inspected)
    (tmp_path / "config.json").write_text('{"changed": true}')
    refused = await models.inspect(name)
    assert isinstance(refused, Refused)
    assert refused.detail.startswith(f"the files of {name} were changed while calls of it are under way; try again")
    first.says(Scored(0, [Verdict("scored", 0.5)]))
    await call
    check = asyncio.create_task(models.inspect(name))
    (await processes.newest(2)).says(*LOADED)
    assert isinstance(await check, Inspected)


async def test_however_many_models_are_down_one_that_is_asked_for_is_not_forgotten(models: RewardModels) -> None:
    names = [f"org/model-{number}" for number in range(66)]
    for name in names:
        await models._model(name)  # pyright: ignore[reportPrivateUsage]
    oldest = next(iter(models._models))  # pyright: ignore[reportPrivateUsage]
    model = await models._model(oldest)  # pyright: ignore[reportPrivateUsage]
    assert model.name == oldest


async def test_a_model_exists_once_its_config_was_read(models: RewardModels, processes: Processes) -> None:
    assert await models.knows("org/name")
    assert not models.exists("org/name")
    call = start_call(models, "org/name")
    process = await processes.newest(1)
    assert not models.exists("org/name")
    process.says(*LOADED, Scored(0, [Verdict("scored", 0.5)]))
    await call
    assert models.exists("org/name")
