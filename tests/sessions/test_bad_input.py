"""Bad input of agent runs, case by case: each gets a sentence that says what to do, and nothing else is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("transformers")

from services.generator.turns.rendering import TurnRenderer
from services.sessions.tools.python_environments import PythonEnvironments
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from services.sessions.tools.tool_tasks import ToolPool, ToolTasks
from services.sessions.tools.user_tools import UserTools
from shared.errors import HeadraceError
from shared.user_code.call_output import MAX_CHARS
from tests.generator.turns.chat_models import NO_TOOLS, make_tokenizer
from tests.sessions.scripted import assistant, call, turns_of
from tests.sessions.session_api.serving import QUESTION, Service, serving
from tests.sessions.test_tool_rollout import Play
from tests.sessions.tools.conftest import LIMITS, CountedWorkers, tool_places

CODE = '''
import os
import sys


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def undocumented(a: int) -> int:
    return a


def untyped(a) -> int:
    """Return a number.

    Args:
        a: The number.
    """
    return a


def prints(path: str) -> str:
    """Print 100 MB to the standard output of this process, which is a file meanwhile.

    Args:
        path: The file.
    """
    file, before = os.open(path, os.O_WRONLY | os.O_CREAT), os.dup(1)
    os.dup2(file, 1)
    for _ in range(1000):
        print("x" * 100_000)
    sys.stdout.flush()
    os.dup2(before, 1)
    return "printed"


class Resets:
    def reset(self, **row):
        return None


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


class ResetsToAList(Resets):
    def reset(self, **row):
        return ["text"]


class RewardIsText(Resets):
    def get_reward(self):
        return "high"
'''


class Code:
    """The tools and environments of a module of its user."""

    def __init__(self, pool: ToolPool, directory: Path) -> None:
        self._pool = pool
        self._directory = directory

    async def tools(self, *names: str) -> UserTools:
        found = [f"my_code:{name}" for name in names]
        return await UserTools.load(found, self._pool, lane="run-test", tool_timeout_s=240.0, check_timeout_s=240.0)

    async def environments(self, name: str) -> PythonEnvironments:
        return await PythonEnvironments.load(
            f"my_code:{name}", tool_places(self._directory), LIMITS, timeout_s=240.0, import_timeout_s=240.0,
            at_once=asyncio.Semaphore(1),
        )  # fmt: skip


@pytest.fixture
async def code(tmp_path: Path) -> AsyncIterator[Code]:
    (tmp_path / "my_code.py").write_text(CODE)
    tasks, metrics = ToolTasks(tool_places(tmp_path)), CountedWorkers()
    async with ToolPool(
        tasks, num_workers=1, limits=LIMITS, queue_timeout_s=240.0, import_timeout_s=240.0, metrics=metrics
    ) as pool:
        yield Code(pool, tmp_path)
        assert metrics.replaced == {}, "a worker was lost"


async def no_docstring(code: Code) -> None:
    await code.tools("add", "undocumented")


async def no_type_hint(code: Code) -> None:
    await code.tools("add", "untyped")


async def no_such_function(code: Code) -> None:
    await code.tools("ad")


async def no_reset(code: Code) -> None:
    await code.environments("NoReset")


async def reset_returns_a_list(code: Code) -> None:
    async with (await code.environments("ResetsToAList")).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")


async def reward_is_text(code: Code) -> None:
    async with (await code.environments("RewardIsText")).started() as environment:
        await environment.reset({}, rollout_id="0-0", group_id="0")
        await environment.reward()


async def template_without_tools(_: Code) -> None:
    TurnRenderer(make_tokenizer(NO_TOOLS)).check()


@pytest.mark.parametrize(
    ("bad", "what", "to_do"),
    [
        (no_docstring, "my_code:undocumented cannot be a tool", "write a docstring in Google's format"),
        (no_type_hint, "my_code:untyped cannot be a tool", "give each argument a type hint"),
        (no_such_function, "ad", "Did you mean add?"),
        (no_reset, "my_code:NoReset makes a NoReset without a method reset(**row)", "add one"),
        (reset_returns_a_list, "it returned a list", "return text, or None"),
        (reward_is_text, "it returned a str", "return a number, or None"),
        (template_without_tools, "ignores tools", "use a model whose template takes tools, or leave the tools out"),
    ],
)
async def test_code_that_cannot_be_used_is_refused_and_the_rest_goes_on(
    code: Code, bad: Callable[[Code], Awaitable[None]], what: str, to_do: str
) -> None:
    with pytest.raises((HeadraceError, ToolLostError)) as refused:
        await bad(code)
    said = str(refused.value)
    assert what in said
    assert to_do in said
    assert "Traceback" not in said
    assert await (await code.tools("add")).call("add", {"a": 1}) == "2"


async def test_a_tool_that_prints_100_mb_has_its_result_and_the_log_its_beginning(code: Code, tmp_path: Path) -> None:
    tools = await code.tools("prints", "add")
    assert await tools.call("prints", {"path": str(tmp_path / "log")}) == "printed"
    assert MAX_CHARS < (tmp_path / "log").stat().st_size < 2 * MAX_CHARS
    assert await tools.call("add", {"a": 1}) == "2"


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("subtract", '{"a": 2}', "Tool subtract not found."),  # TRL's words
        ("add", '{"a": 2', "the arguments are not JSON: "),
        ("add", "2, 2", "the arguments are not JSON: "),
        ("add", '"2"', "the arguments are not a JSON object"),
    ],
)
async def test_a_call_that_the_model_got_wrong_is_answered_and_the_rollout_goes_on(
    name: str, arguments: str, says: str
) -> None:
    rollout = await Play(turns_of(assistant("", call(name, arguments)), assistant("4")))()
    assert says in rollout.completion[1]["content"]
    assert rollout.completion[2] == assistant("4")
    assert (rollout.lost, rollout.num_failed) == ("", 1)


@pytest.mark.parametrize(("name", "wrong"), [("subtract", {}), ("add", {"a": 1, "c": 2}), ("add", {})])
async def test_a_worker_outlives_a_call_that_the_model_got_wrong(code: Code, name: str, wrong: dict[str, Any]) -> None:
    tools = await code.tools("add")
    with pytest.raises(ToolError) as answered:
        await tools.call(name, wrong)
    assert name in str(answered.value)
    assert await tools.call("add", {"a": 1}) == "2"


async def ask(service: Service, session: dict[str, Any], *, key: str) -> tuple[int, str]:
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        reply = await http.post(
            f"{session['base_url']}/chat/completions",
            json={"messages": QUESTION},
            headers={"authorization": f"Bearer {key}"},
        )
    assert "Traceback" not in reply.text
    return reply.status_code, str(reply.json().get("error", {}).get("message"))


async def test_the_key_of_a_session_of_another_run_opens_nothing_and_both_sessions_go_on() -> None:
    async with (
        serving() as service,
        service.sessions.serving("run-other", service.generators, max_completion_length=100),
    ):
        mine, other = await service.open(), await service.open(run_id="run-other")
        status, said = await ask(service, mine, key=other["api_key"])
        assert (status, "use the api_key that came with its URL" in said) == (401, True)
        assert (await service.view(mine))["turns"] == 0
        for session in (mine, other):
            assert (await ask(service, session, key=session["api_key"]))[0] == 200


async def test_a_finished_session_says_so_keeps_its_turns_and_others_go_on() -> None:
    async with serving() as service:
        ended, other = await service.open(), await service.open()
        assert (await ask(service, ended, key=ended["api_key"]))[0] == 200
        key = {"authorization": f"Bearer {ended['api_key']}"}
        await service.http.post(f"{ended['base_url']}/end", headers=key)
        status, said = await ask(service, ended, key=ended["api_key"])
        assert (status, "is over; open another one" in said) == (410, True)
        assert (await service.view(ended))["turns"] == 1
        assert (await ask(service, other, key=other["api_key"]))[0] == 200
