"""Edits of reward modules while the rewarder runs: real files and workers; the test decides when files are checked."""

import asyncio
import hashlib
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rewarder.python_functions.module_watch import ModuleWatch
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.messages import RewardOutcome
from shared.user_code.places import Places
from tests.eventually import eventually
from tests.rewarder.conftest import call_with, pool_and_scorer, until
from tests.rewarder.test_scorer import functions_shown

SYNC, ON_LOOP, WAITS, LAZY = (f"edited_rewards:{name}" for name in ("sync", "on_loop", "waits", "lazy"))
SOURCE = """
import pathlib, time
import edited_parts.value
def sync(**_): return [{0} + edited_parts.value.EXTRA]
async def on_loop(**_): return [{0} + edited_parts.value.EXTRA]
def lazy(**_):
    from edited_parts import late
    return [late.VALUE]
def waits(go, started, **_):
    pathlib.Path(started[0]).touch()
    while not pathlib.Path(go[0]).exists():
        time.sleep(0.005)
    return [{0}]
"""

UPLOAD = """
import os
def worker(**_): return [float(os.getpid())]
async def on_loop(**_): return [1.0]
"""


class Edited:
    """A module and a package, a scorer that knows the module, and the watch over both."""

    def __init__(self, directory: Path, pool: RewardPool, scorer: Scorer) -> None:
        self.directory = directory
        self.pool = pool
        self.scorer = scorer
        self.functions: PythonFunctions = scorer._functions  # pyright: ignore[reportPrivateUsage]
        self.watch = ModuleWatch(self.functions, places=Places((str(directory),)), every_s=1.0)

    def write(self, name: str, text: str) -> None:
        """Write a file as editors do: under another name, then renamed."""
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        os.replace(new, path)

    async def look_twice(self) -> None:
        """Check the files twice: the first check sees a change, the second that it is complete."""
        await self.watch.look()
        await self.watch.look()

    async def outcomes(self, *names: str, **columns: object) -> tuple[RewardOutcome, ...]:
        """Score one completion."""
        functions = [WeightedFunction(name) for name in names]
        rows = await self.scorer.score(call_with("a", **columns), functions, timeout_s=60, lane="test")
        return rows[0]

    async def values(self, *names: str) -> list[float | None]:
        """Return the functions' values for one completion."""
        return [outcome.value for outcome in await self.outcomes(*names)]

    def warning(self) -> str:
        """Return the warning in the list, which is the same for all functions of the module."""
        (warning,) = {warning for _, _, _, warning in self.functions.listed()}
        return warning


@pytest.fixture
async def edited(metrics: RewarderMetrics, tmp_path: Path) -> AsyncIterator[Edited]:
    tasks = RewardTasks(Places((str(tmp_path),)))
    async with pool_and_scorer(metrics, tasks) as (pool, scorer):
        files = Edited(tmp_path, pool, scorer)
        files.write("edited_parts/__init__.py", "")
        files.write("edited_parts/value.py", "from .deep import EXTRA")
        files.write("edited_parts/deep.py", "EXTRA = 0.0")
        files.write("edited_parts/late.py", "VALUE = 5.0")
        files.write("edited_rewards.py", SOURCE.format("1.0"))
        assert await files.values(SYNC, ON_LOOP, LAZY) == [1.0, 1.0, 5.0]
        await files.look_twice()
        yield files
    while str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


async def test_an_edit_is_used_after_two_checks_under_its_own_version(edited: Edited) -> None:
    before = {outcome.version for outcome in await edited.outcomes(SYNC, ON_LOOP, LAZY)}
    edited.write("edited_rewards.py", SOURCE.format("2.0"))
    await edited.watch.look()
    assert await edited.values(SYNC, ON_LOOP) == [1.0, 1.0], "it may still be being written"
    await edited.watch.look()
    after = await edited.outcomes(SYNC, ON_LOOP, LAZY)
    assert [outcome.value for outcome in after] == [2.0, 2.0, 5.0]
    versions = {outcome.version for outcome in after}
    assert len(before) == len(versions) == 1
    assert before != versions
    assert {version for _, _, version, _ in edited.functions.listed()} == versions


async def test_a_file_that_was_only_touched_keeps_its_version(edited: Edited, caplog: pytest.LogCaptureFixture) -> None:
    (before,) = await edited.outcomes(SYNC)
    os.utime(edited.directory / "edited_rewards.py", (1, 1))
    await edited.look_twice()
    (after,) = await edited.outcomes(SYNC)
    assert after.version == before.version
    assert not [record for record in caplog.records if "imported again" in record.getMessage()]


@pytest.mark.parametrize(
    ("file", "text", "values"),
    [("deep.py", "EXTRA = 0.5", [1.5, 1.5, 5.0]), ("late.py", "VALUE = 6.0", [1.0, 1.0, 6.0])],
)
async def test_a_module_that_it_imports_is_watched_too(
    edited: Edited, file: str, text: str, values: list[float]
) -> None:
    (before,) = await edited.outcomes(SYNC)
    edited.write(f"edited_parts/{file}", text)
    assert await edited.values(SYNC, ON_LOOP, LAZY) == [1.0, 1.0, 5.0]
    await edited.look_twice()
    after = await edited.outcomes(SYNC, ON_LOOP, LAZY)
    assert [outcome.value for outcome in after] == values
    assert before.version not in {outcome.version for outcome in after}


async def test_an_edit_that_does_not_import_leaves_the_old_version_in_force_with_a_warning(
    edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    (before,) = await edited.outcomes(SYNC)
    edited.write("edited_parts/deep.py", "EXTRA = = 0.5")
    await edited.look_twice()
    (still,) = await edited.outcomes(SYNC)
    assert (still.value, still.version) == (1.0, before.version)
    assert edited.warning().startswith(
        f"an edit of edited_rewards is not in force, version {before.version} still is: importing edited_rewards "
        "failed: SyntaxError: invalid syntax (deep.py, line 1)"
    )
    assert [record.levelname for record in caplog.records if "is not in force" in record.getMessage()] == ["WARNING"]
    await edited.look_twice()
    assert len([record for record in caplog.records if "is not in force" in record.getMessage()]) == 1, "said once"

    edited.write("edited_parts/deep.py", "EXTRA = 0.5")
    await edited.look_twice()
    assert await edited.values(SYNC, ON_LOOP) == [1.5, 1.5]
    assert edited.warning() == ""


async def test_an_edit_that_is_taken_back_takes_the_warning_back(edited: Edited) -> None:
    edited.write("edited_rewards.py", "nothing")
    await edited.look_twice()
    assert "NameError" in edited.warning()
    edited.write("edited_rewards.py", SOURCE.format("1.0"))
    await edited.look_twice()
    assert edited.warning() == ""


async def test_an_edit_that_takes_a_function_away_which_is_in_use_is_not_in_force(edited: Edited) -> None:
    edited.write("edited_rewards.py", "async def on_loop(**_): return [2.0]\ndef lazily(**_): return [2.0]")
    await edited.look_twice()
    assert await edited.values(SYNC, ON_LOOP) == [1.0, 1.0]
    assert "module edited_rewards has no function " in edited.warning()


async def test_a_file_that_is_being_written_is_not_imported(edited: Edited, caplog: pytest.LogCaptureFixture) -> None:
    path = edited.directory / "edited_rewards.py"
    for part in ("", "import pathl", SOURCE.format("2.0")[:120]):
        path.write_text(part)
        await edited.watch.look()
    path.write_text(SOURCE.format("2.0"))
    await edited.look_twice()
    assert await edited.values(SYNC) == [2.0]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_file_that_has_vanished_costs_nothing_but_a_warning(edited: Edited) -> None:
    (edited.directory / "edited_rewards.py").unlink()
    (edited.directory / "edited_parts" / "late.py").unlink()
    await edited.look_twice()
    assert edited.warning().endswith("edited_rewards.py, late.py cannot be found")
    edited.pool.renew()  # new workers import the module too, and so does a worker that needs it for the first time
    assert await edited.values(SYNC, LAZY) == [1.0, 5.0]
    edited.write("edited_parts/late.py", "VALUE = 6.0")
    edited.write("edited_rewards.py", SOURCE.format("1.0"))
    await edited.look_twice()
    assert await edited.values(SYNC, LAZY) == [1.0, 6.0]
    assert edited.warning() == ""


async def test_a_module_without_a_file_is_forgotten_when_nothing_has_used_it_for_a_while(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (edited.directory / "edited_rewards.py").read_text()
    (edited.directory / "edited_rewards.py").unlink()
    await edited.look_twice()
    assert "edited_rewards" in edited.functions.modules
    monkeypatch.setattr("services.rewarder.python_functions.python_functions._IN_USE_FOR_S", 0.0)
    monkeypatch.setattr("services.rewarder.python_functions.module_watch._LAST_RETRY_S", 0.0)
    await edited.look_twice()  # the retry of the first warning is due in minutes
    edited.watch = ModuleWatch(edited.functions, places=Places((str(edited.directory),)), every_s=1.0)
    await edited.look_twice()
    assert edited.functions.modules == {}
    assert edited.functions.listed() == []
    edited.write("edited_rewards.py", text)
    assert await edited.values(SYNC) == [1.0], "it is read again when it is named again"


async def test_without_looks_for_edits_uploads_without_a_use_are_forgotten(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rewarder.python_functions.python_functions._IN_USE_FOR_S", 0.0)
    name = f"edited_upload_{1:024x}"
    edited.write(f"{name}.py", UPLOAD)
    before = await edited.values(SYNC)
    assert await edited.values(f"{name}:on_loop") == [1.0]
    edited.write("edited_rewards.py", SOURCE.format("3.0"))
    edited.watch = ModuleWatch(edited.functions, places=Places((str(edited.directory),)), every_s=0)
    for _ in range(3):
        await edited.watch.look()
    assert edited.functions.modules.keys() == {"edited_rewards"}
    assert await edited.values(SYNC) == before


async def test_without_looks_for_edits_the_files_that_an_upload_imports_are_not_read_again(edited: Edited) -> None:
    name = f"edited_upload_{2:024x}"
    edited.write(f"{name}.py", "import edited_parts.value\ndef sync(**_): return [edited_parts.value.EXTRA]")
    assert await edited.values(f"{name}:sync") == [0.0]
    edited.watch = ModuleWatch(edited.functions, places=Places((str(edited.directory),)), every_s=0)
    edited.write("edited_parts/deep.py", "EXTRA = 1.0")
    for _ in range(3):
        await edited.watch.look()
    assert await edited.values(f"{name}:sync") == [0.0]


async def test_uploads_without_a_use_leave_nothing_behind(
    edited: Edited, metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"edited_upload_{number:024x}" for number in range(4)]
    workers = set[float | None]()
    for name in names:
        edited.write(f"{name}.py", UPLOAD)
        workers.update(await edited.values(f"{name}:worker"))
        assert await edited.values(f"{name}:on_loop") == [1.0]
    await edited.watch.look()
    assert set(names) <= edited.functions.modules.keys(), "it was called a moment ago"
    assert f"{names[0]}:on_loop" in functions_shown(metrics)
    monkeypatch.setattr("services.rewarder.python_functions.python_functions._IN_USE_FOR_S", 0.0)
    await edited.watch.look()
    assert edited.functions.modules.keys() == {"edited_rewards"}
    assert not any("edited_upload" in name for name in functions_shown(metrics))
    assert not sys.modules.keys() & set(names)
    await eventually(lambda: not any("edited_upload" in thread.name for thread in threading.enumerate()))
    assert await edited.values(f"{names[0]}:on_loop") == [1.0], "it is read again"
    assert workers.isdisjoint(await edited.values(f"{names[0]}:worker"))


async def test_calls_that_were_begun_or_waited_end_in_the_version_of_their_group(
    edited: Edited, tmp_path: Path
) -> None:
    go, started = tmp_path / "go", [tmp_path / "started-0", tmp_path / "started-1"]
    (before,) = await edited.outcomes(SYNC)
    holders = [asyncio.create_task(edited.outcomes(WAITS, go=str(go), started=str(path))) for path in started]

    async def are_held() -> bool:
        return all(path.exists() for path in started)

    await until(are_held, what="both workers to be held")
    group = asyncio.create_task(edited.outcomes(SYNC, LAZY, ON_LOOP))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    edited.write("edited_rewards.py", SOURCE.format("2.0"))
    edited.write("edited_parts/late.py", "VALUE = 6.0")
    await edited.look_twice()
    assert await edited.values(ON_LOOP) == [2.0], "new calls use the new version"
    assert not group.done()
    go.touch()
    for (held,) in await asyncio.gather(*holders):
        assert (held.value, held.version) == (1.0, before.version)
    assert [(outcome.value, outcome.version) for outcome in await group] == [
        (1.0, before.version),
        (5.0, before.version),
        (1.0, before.version),
    ]
    assert await edited.values(SYNC, LAZY, ON_LOOP) == [2.0, 6.0, 2.0]


async def test_two_modules_with_a_part_in_common_are_each_scored_with_the_part_they_were_taken_in_with(
    edited: Edited,
) -> None:
    edited.write("edited_parts/deep.py", "EXTRA = 0.25")
    edited.write("edited_others.py", SOURCE.format("10.0"))
    # The other module is imported now. The first one has not been checked since.
    others = ("edited_others:sync", "edited_others:on_loop")
    for _ in range(3):
        assert await edited.values(SYNC, others[0], ON_LOOP, others[1]) == [1.0, 10.25, 1.0, 10.25]
    await edited.look_twice()
    assert await edited.values(SYNC, others[0], ON_LOOP, others[1]) == [1.25, 10.25, 1.25, 10.25]


async def test_a_module_of_one_file_has_the_first_digits_of_its_sha256_as_its_version(edited: Edited) -> None:
    text = "def single(**_): return [3.0]"
    edited.write("edited_alone.py", text)
    (outcome,) = await edited.outcomes("edited_alone:single")
    assert (outcome.value, outcome.version) == (3.0, hashlib.sha256(text.encode()).hexdigest()[:12])
