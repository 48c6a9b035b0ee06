"""Async functions in the service: their modules are imported in this process, and may hang."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from shared.user_code.places import Places
from tests.eventually import eventually

pytestmark = pytest.mark.unit

CALL = RewardCall(prompts=["p"], completions=["c"], columns={})
QUICK = "async def quick(**_): return [1.0]"
SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
(here / "started").touch()
while not (here / "go").exists():
    time.sleep(0.005)
async def slow(**_): return [2.0]
"""

KEEPS_A_LOOP = """
import asyncio
kept = asyncio.get_event_loop()
async def is_kept(**_): return [float(asyncio.get_running_loop() is kept)]
"""

CHANGES_ITS_ROWS = """
async def changes(completions, answers, **_):
    number = float(len(completions) + len(answers[0]))
    completions.append("more")
    answers[0].append("more")
    return [number]
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with modules. The import of ``loop_slow`` waits for the file ``go``."""
    (tmp_path / "loop_quick.py").write_text(QUICK)
    (tmp_path / "loop_slow.py").write_text(SLOW)
    (tmp_path / "loop_kept.py").write_text(KEEPS_A_LOOP)
    (tmp_path / "loop_changing.py").write_text(CHANGES_ITS_ROWS)
    yield tmp_path
    (tmp_path / "go").touch()
    for name in ("loop_quick", "loop_slow", "loop_kept", "loop_changing"):
        sys.modules.pop(name, None)
    while str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


async def value(functions: LoopFunctions, name: str) -> float | None:
    answer, _ = await functions.call(name, CALL, timeout_s=60, sources=None)
    return answer.verdicts[0].value


async def test_an_imported_function_answers_while_the_import_of_another_hangs(directory: Path) -> None:
    functions = LoopFunctions(places=Places((str(directory),)), import_timeout_s=60.0)
    assert await value(functions, "loop_quick:quick") == 1.0
    given_up, slow = (asyncio.create_task(value(functions, "loop_slow:slow")) for _ in range(2))
    await eventually(lambda: (directory / "started").exists())
    given_up.cancel()
    assert await value(functions, "loop_quick:quick") == 1.0
    assert not slow.done()
    (directory / "go").touch()
    assert await slow == 2.0
    await eventually(functions.close)


async def test_an_import_that_is_overdue_is_not_waited_for_again_and_is_used_once_it_ends(directory: Path) -> None:
    functions = LoopFunctions(places=Places((str(directory),)), import_timeout_s=0.2)
    with pytest.raises(RewardFailure, match=r"importing its module took longer than 0\.2 s"):
        await value(functions, "loop_slow:slow")
    for _ in range(3):
        with pytest.raises(RewardFailure, match=r"importing loop_slow took longer than .* and has not ended since"):
            await value(functions, "loop_slow:slow")
    (directory / "go").touch()
    found: list[float | None] = []

    async def is_used() -> bool:
        try:
            found.append(await value(functions, "loop_slow:slow"))
        except RewardFailure:
            return False
        return True

    await eventually(is_used)
    assert found == [2.0]
    await eventually(functions.close)


async def test_the_event_loop_that_a_module_gets_at_its_import_is_the_one_that_runs_its_functions(
    directory: Path,
) -> None:
    functions = LoopFunctions(places=Places((str(directory),)), import_timeout_s=60.0)
    assert await value(functions, "loop_kept:is_kept") == 1.0
    await eventually(functions.close)


async def test_a_function_changes_only_its_own_rows(directory: Path) -> None:
    functions = LoopFunctions(places=Places((str(directory),)), import_timeout_s=60.0)
    call = RewardCall(prompts=["p"], completions=["c"], columns={"answers": [["a"]]})
    for _ in range(2):
        answer, _ = await functions.call("loop_changing:changes", call, timeout_s=60, sources=None)
        assert answer.verdicts[0].value == 2.0
    await eventually(functions.close)
