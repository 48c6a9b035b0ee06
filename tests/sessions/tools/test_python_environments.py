"""Environments in real processes: one a rollout, with its own state, and killed at its end."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from services.sessions.tools import python_environments
from services.sessions.tools.python_environments import PythonEnvironments
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from shared.errors import UserError
from tests.eventually import eventually
from tests.rewarder.conftest import is_running
from tests.sessions.tools.conftest import LIMITS, USER_CODE, tool_places


async def environments_of(factory: str, *, timeout_s: float = 120.0, num_places: int = 4) -> PythonEnvironments:
    return await PythonEnvironments.load(
        f"environments_under_test:{factory}",
        tool_places(USER_CODE),
        LIMITS,
        timeout_s=timeout_s,
        import_timeout_s=240.0,
        at_once=asyncio.Semaphore(num_places),
    )


async def play(environments: PythonEnvironments, seed: str) -> dict[str, Any]:
    """Reset an environment, and return its attributes."""
    async with environments.started() as environment:
        await environment.reset({}, rollout_id=seed, group_id="0")
        return (await environment.state()).attributes


@pytest.mark.parametrize("factory", ["Counter", "make_counter"])
async def test_an_environment_keeps_its_state_from_its_reset_to_its_reward(factory: str) -> None:
    environments = await environments_of(factory)
    tools = [schema["function"]["name"] for schema in environments.schemas]
    assert tools == ["add", "crash", "hang", "process", "wait_and_add"]
    assert (environments.name, environments.has_reward) == ("environments_under_test:Counter", True)
    async with environments.started() as environment:
        assert await environment.reset({"goal": 8, "level": "easy"}, rollout_id="0-0", group_id="0") == "Count to 8."
        assert await environment.call("add", {"number": 2}) == "2 of 8"
        assert await environment.call("wait_and_add", {"number": 1}) == "3 of 8"
        assert await environment.call("wait_and_add", {"number": 1}) == "4 of 8"
        assert await environment.reward() == 0.5


async def test_a_method_with_two_names_is_one_tool() -> None:
    environments = await environments_of("Aliased")
    assert [schema["function"]["name"] for schema in environments.schemas] == ["guess"]


async def test_no_state_is_shared_and_the_process_ends_with_the_rollout() -> None:
    environments = await environments_of("Counter")
    async with environments.started() as one, environments.started() as other:
        await asyncio.gather(
            one.reset({"goal": 8}, rollout_id="0-0", group_id="0"),
            other.reset({"goal": 9}, rollout_id="0-1", group_id="0"),
        )
        await one.call("add", {"number": 5})
        assert await other.call("add", {"number": 1}) == "1 of 9"
        processes = [str(await environment.call("process", {})).split() for environment in (one, other)]
    assert [made for _, made in processes] == ["1", "1"]
    assert len({pid for pid, _ in processes}) == 2
    await eventually(lambda: not any(is_running(int(pid)) for pid, _ in processes))


async def test_clean_up_code_runs_at_the_end_of_a_rollout_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_environments, "_CLEAN_UP_S", 120.0)
    async with (await environments_of("CleansUp")).started() as environment:
        await environment.reset({"directory": str(tmp_path)}, rollout_id="0-0", group_id="0")
        assert os.listdir(tmp_path) == ["pid"]
    await eventually(lambda: {*os.listdir(tmp_path)} == {"pid", "del", "finalize", "atexit"})
    await eventually(lambda: not is_running(int((tmp_path / "pid").read_text())))


async def test_clean_up_code_that_stands_still_is_killed_and_keeps_its_place_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_environments, "_CLEAN_UP_S", 10.0)
    environments = await environments_of("CleansUp", num_places=1)
    row = {"directory": str(tmp_path), "stands_still": True}
    async with environments.started() as environment:
        await environment.reset(row, rollout_id="0-0", group_id="0")
    assert is_running(pid := int((tmp_path / "pid").read_text()))
    async with asyncio.timeout(60), environments.started():
        assert (tmp_path / "del").exists()
        assert not is_running(pid)


async def test_calls_at_the_same_time_are_made_one_after_the_other() -> None:
    async with (await environments_of("Counter")).started() as environment:
        await environment.reset({"goal": 8}, rollout_id="0-0", group_id="0")
        said = await asyncio.gather(*(environment.call("add", {"number": 1}) for _ in range(3)))
    assert said == ["1 of 8", "2 of 8", "3 of 8"]


async def test_the_model_gets_the_error_of_a_method_and_the_state_stays() -> None:
    async with (await environments_of("Counter")).started() as environment:
        await environment.reset({"goal": 8}, rollout_id="0-0", group_id="0")
        await environment.call("add", {"number": 5})
        for name, arguments, says in (
            ("add", {"number": -1}, "only upwards"),
            ("add", {"amount": 1}, "Counter.add() got an unexpected keyword argument 'amount'"),
            ("reset", {"goal": 1}, "Tool reset not found."),
            ("get_reward", {}, "Tool get_reward not found."),
            ("_secret", {}, "Tool _secret not found."),
            ("__init__", {}, "Tool __init__ not found."),
        ):
            with pytest.raises(ToolError) as raised:
                await environment.call(name, arguments)
            assert str(raised.value) == says
        assert await environment.call("add", {"number": 1}) == "6 of 8"


async def test_an_environment_without_a_reward_or_an_observation_has_none() -> None:
    environments = await environments_of("Quiet")
    assert (environments.schemas, environments.has_reward) == ([], False)
    async with environments.started() as environment:
        assert await environment.reset({}, rollout_id="0-0", group_id="0") == ""
        assert await environment.reward() is None


@pytest.mark.parametrize("factory", ["NotJudged", "NotANumber"])
async def test_a_reward_of_none_or_nan_is_none(factory: str) -> None:
    async with (await environments_of(factory)).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")
        assert await environment.reward() is None


async def test_an_infinite_reward_loses_the_rollout() -> None:
    async with (await environments_of("Infinite")).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")
        with pytest.raises(ToolLostError, match="get_reward returned inf"):
            await environment.reward()


async def test_public_attributes_are_told_as_json_and_for_others_the_reason() -> None:
    async with (await environments_of("Attributes")).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")
        state = await environment.state()
    assert state.attributes == {
        "board": [[1, 2], [3, 4]], "by_number": {"1": "one"}, "done": True, "of_class": 0.5, "of_property": "seen",
        "pair": ["a", 1], "score": 1.5, "text": "\N{SNOWMAN}",
    }  # fmt: skip
    assert {name: why.partition(":")[0] for name, why in state.left_out.items()} == {
        "broken": "ValueError", "client": "TypeError", "deep": "ValueError", "huge": "OverflowError",
        "large": "it has more than 65536 characters as JSON, which all attributes together may have",
        "letters": "TypeError", "not_a_number": "ValueError", "surrogate": "DecodeError",
    }  # fmt: skip


async def test_attributes_that_cannot_be_read_in_time_lose_the_rollout() -> None:
    async with (await environments_of("SlowProperty", timeout_s=2.0)).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")
        with pytest.raises(ToolLostError, match="SlowProperty: reading its public attributes took longer than 2 s"):
            await environment.state()


async def test_an_environment_that_is_played_again_draws_the_same_numbers_and_another_one_others() -> None:
    environments = await environments_of("Draws")
    first, again, other = [await play(environments, seed) for seed in ("0-0", "0-0", "0-1")]
    assert first == again
    assert first["python"] != other["python"]
    assert first["numpy"] != other["numpy"]


async def test_no_more_environments_than_allowed_run_at_a_time() -> None:
    environments = await environments_of("Quiet")
    async with environments.started(), environments.started(), environments.started(), environments.started():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), environments.started():
                pass
    async with environments.started() as environment:
        assert await environment.reset({}, rollout_id="0-0", group_id="0") == ""


SLOWLY_IMPORTED = """
import time

began_at = time.monotonic()
time.sleep(0.3)
with open({log!r}, "a") as file:
    file.write(f"{{began_at}} {{time.monotonic()}}\\n")


class Slow:
    def reset(self, **row):
        return "done"
"""


async def test_no_more_modules_are_imported_at_a_time_than_there_are_processors(tmp_path: Path) -> None:
    log, num_at_once = tmp_path / "log", os.cpu_count() or 1
    (tmp_path / "slowly_imported.py").write_text(SLOWLY_IMPORTED.format(log=str(log)))
    environments = await PythonEnvironments.load(
        "slowly_imported:Slow",
        tool_places(tmp_path),
        LIMITS,
        timeout_s=120.0,
        import_timeout_s=240.0,
        at_once=asyncio.Semaphore(3 * num_at_once),
    )
    log.unlink()  # that import was the check's

    async def play_one(number: int) -> str:
        async with environments.started() as environment:
            return await environment.reset({}, rollout_id=f"0-{number}", group_id="0")

    assert await asyncio.gather(*map(play_one, range(3 * num_at_once))) == ["done"] * 3 * num_at_once
    imports = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    assert len(imports) == 3 * num_at_once
    together = [sum(began <= moment < ended for began, ended in imports) for moment, _ in imports]
    assert max(together) <= num_at_once


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("hang", "hang took longer than 5 s and was killed"),
        ("crash", "crash: its process died: it ended with exit status 7"),
    ],
)
async def test_an_environment_that_hangs_or_crashes_is_lost(method: str, says: str) -> None:
    async with (await environments_of("Counter", timeout_s=5.0)).started() as environment:
        await environment.reset({"goal": 8}, rollout_id="0-0", group_id="0")
        with pytest.raises(ToolLostError, match=says):
            await environment.call(method, {})
        with pytest.raises(ToolLostError):
            await environment.call("add", {"number": 1})


async def test_a_reset_that_fails_loses_the_rollout_and_says_why() -> None:
    async with (await environments_of("FailsToReset")).started() as environment:
        with pytest.raises(ToolLostError, match="reset ended with an exception: no such level") as lost:
            await environment.reset({}, rollout_id="0-0", group_id="0")
    assert len(str(lost.value)) < 1000, "each rollout of a group has it, and each line of a log"


async def test_an_observation_that_is_not_text_loses_the_rollout_and_says_what_to_return() -> None:
    async with (await environments_of("ReturnsAList")).started() as environment:
        with pytest.raises(ToolLostError, match="it returned a list; return text, or None"):
            await environment.reset({}, rollout_id="0-0", group_id="0")


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("WithoutReset", "makes a WithoutReset without a method reset(**row); add one"),
        (
            "WithoutDocstring",
            "environments_under_test:WithoutDocstring.act cannot be a tool: DocstringParsingException",
        ),
        ("NeedsArguments", "missing 1 required positional argument: 'size'; it is called without arguments"),
        ("Popen", "only imports Popen, which belongs to subprocess"),
        ("SHELL", "only imports SHELL, which belongs to subprocess"),
        ("Contour", "has no class or function Contour. Did you mean Counter?"),
    ],
)
async def test_a_factory_that_cannot_be_used_is_refused_with_what_to_do(factory: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        await environments_of(factory)
    assert says in str(refused.value)
