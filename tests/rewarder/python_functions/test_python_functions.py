"""Which version of a module is used if its files change while they are read. No processes."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.module_watch import ModuleWatch
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall, Verdict
from shared.user_code.module_sources import SourceFile, Sources, version_of
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused
from tests.eventually import eventually

pytestmark = pytest.mark.unit


class FakePool:
    """Finds ``def NAME(`` in the current file; ``after_reading`` is called before it reports that."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inspections = self
        self.after_reading: list[Callable[[], Awaitable[None]]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.num_held = 0

    async def inspect(self, function: str, *, sources: Sources | None = None, **_more: Any) -> Inspected | Refused:
        module, _, name = function.partition(":")
        path = self.directory / f"{module}.py"
        code = path.read_bytes() if sources is None else sources.files[0].code
        if self.after_reading:
            await self.after_reading.pop(0)()
        if module in self.held:
            self.num_held += 1
            await self.held[module].wait()
        if f"def {name}(".encode() not in code:
            return Refused(f"module {module} has no function {name}")
        file = SourceFile(module, str(path), is_package=False, code=code)
        version = version_of([file])
        return Inspected("sync", "", [], Sources(module, version, (file,)), version)

    async def call(self, name: str, call: bytes, **_more: Any) -> tuple[Answer, float]:
        rows = msgspec.msgpack.decode(call, type=RewardCall)
        return Answer([Verdict("scored", rows.timeout_s)] * len(rows.completions)), 0.0

    def renew(self) -> None: ...


class Files:
    """Modules in a directory, and the functions known from them."""

    def __init__(self, directory: Path, in_use: Collection[str]) -> None:
        self.directory = directory
        self.pool = FakePool(directory)
        self.functions = PythonFunctions(
            cast("Any", self.pool),
            loop_functions=LoopFunctions(places=Places((str(directory),)), import_timeout_s=60.0),
            import_timeout_s=60.0,
            check_timeout_s=60.0,
            in_use=lambda: in_use,
        )

    def write(self, module: str, code: str) -> None:
        (self.directory / f"{module}.py").write_text(code)

    def in_force(self, module: str) -> str:
        """Return the source of the version in use."""
        return self.functions.modules[module].files[0].code.decode()


@pytest.fixture
def in_use() -> set[str]:
    return set()


@pytest.fixture
def files(tmp_path: Path, in_use: set[str]) -> Files:
    return Files(tmp_path, in_use)


async def test_a_worker_is_told_the_deadline_of_its_call(files: Files) -> None:
    answer, _ = await files.functions.call("regex_reward", RewardCall(["p"], ["c"], {}), timeout_s=7.0, lane="run")
    assert answer.verdicts == [Verdict("scored", 7.0)]


ONE, OTHER, BOTH = "def one(", "def other(", "def one( def other("


async def test_a_check_takes_in_no_edit_that_lacks_what_a_run_uses(files: Files, in_use: set[str]) -> None:
    files.write("m", BOTH)
    for name in ("m:one", "m:other"):
        assert isinstance(await files.functions.inspect(name), Inspected)
    files.write("m", ONE)
    in_use.add("m:other")
    assert await files.functions.inspect("m:one") == Refused(
        "m was edited, and a run uses m:other, which cannot be used any more: module m has no function other"
    )
    assert files.in_force("m") == BOTH
    in_use.clear()
    assert isinstance(await files.functions.inspect("m:one"), Inspected)
    assert files.in_force("m") == ONE


async def test_a_check_that_takes_an_edit_in_keeps_the_other_functions_of_runs(files: Files, in_use: set[str]) -> None:
    files.write("m", BOTH)
    for name in ("m:one", "m:other"):
        await files.functions.inspect(name)
    in_use.add("m:other")
    files.write("m", BOTH + " # edited")
    assert isinstance(await files.functions.inspect("m:one"), Inspected)
    assert files.functions.exists("m:other")
    assert files.in_force("m") == BOTH + " # edited"


async def test_a_file_that_is_saved_while_a_check_imports_it_is_imported_again(files: Files) -> None:
    files.write("m", ONE)

    async def save() -> None:
        files.write("m", BOTH)

    files.pool.after_reading = [save]
    inspected = await files.functions.inspect("m:one")
    assert isinstance(inspected, Inspected)
    assert files.in_force("m") == BOTH
    assert inspected.version == files.functions.modules["m"].version


async def test_a_check_that_ends_after_a_later_edit_was_taken_in_does_not_take_it_back(files: Files) -> None:
    files.write("m", ONE)
    await files.functions.inspect("m:one")
    files.write("m", ONE + " # second")

    async def save_and_reload() -> None:
        files.write("m", ONE + " # third")
        assert await files.functions.reload("m")

    files.pool.after_reading = [save_and_reload]
    assert isinstance(await files.functions.inspect("m:one"), Inspected)
    assert files.in_force("m") == ONE + " # third"


async def test_a_file_that_is_saved_while_an_edit_of_it_is_imported_waits_for_the_next_look(files: Files) -> None:
    files.write("m", ONE)
    await files.functions.inspect("m:one")
    files.write("m", ONE + " # second")

    async def save() -> None:
        files.write("m", ONE + " # third")

    files.pool.after_reading = [save]
    watch = ModuleWatch(files.functions, places=Places((str(files.directory),)), every_s=60.0)
    for _ in range(2):
        await watch.look()
    assert files.in_force("m") == ONE, "the third was never imported, and the second no longer exists"
    for _ in range(2):
        await watch.look()
    assert files.in_force("m") == ONE + " # third"


async def test_an_edit_that_takes_for_ever_to_import_holds_up_no_other_module(files: Files) -> None:
    for module in ("hanging", "quick"):
        files.write(module, ONE)
        await files.functions.inspect(f"{module}:one")
    files.pool.held["hanging"] = asyncio.Event()
    files.write("hanging", ONE + " # hangs")
    watch = ModuleWatch(files.functions, places=Places((str(files.directory),)), every_s=0.001)
    watching = asyncio.create_task(watch.run())
    try:
        await eventually(lambda: files.pool.num_held)
        files.write("quick", ONE + " # edited")
        await eventually(lambda: files.in_force("quick") == ONE + " # edited")
        assert files.in_force("hanging") == ONE
        files.pool.held["hanging"].set()
        await eventually(lambda: files.in_force("hanging") == ONE + " # hangs")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
