"""Tools in real workers: results for the model, errors for the model, and calls without an answer."""

from pathlib import Path

import pytest

from services.sessions.tools.tool_answer import MAX_RESULT_CHARS, ListResult
from services.sessions.tools.tool_errors import ToolError, ToolLostError
from services.sessions.tools.tool_tasks import ToolPool
from services.sessions.tools.user_tools import UserTools
from shared.errors import UserError
from tests.eventually import eventually
from tests.sessions.tools.conftest import CountedWorkers


async def tools_of(pool: ToolPool, *functions: str, tool_timeout_s: float = 120.0) -> UserTools:
    names = [name if ":" in name else f"tools_under_test:{name}" for name in functions]
    return await UserTools.load(names, pool, lane="run-test", tool_timeout_s=tool_timeout_s, check_timeout_s=240.0)


async def test_a_tool_is_described_by_its_type_hints_and_docstring(pool: ToolPool) -> None:
    tools = await tools_of(pool, "multiply", "greet")
    multiply, greet = tools.schemas
    assert multiply == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first factor."},
                    "b": {"type": "integer", "description": "The second factor."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }
    assert greet["function"]["name"] == "greet"


async def test_the_model_gets_the_text_of_what_a_tool_returns(pool: ToolPool) -> None:
    tools = await tools_of(pool, "multiply", "greet", "lookup")
    assert await tools.call("multiply", {"a": 21}) == "42"
    assert await tools.call("multiply", {"a": 10**30, "b": 10}) == "1" + "0" * 31
    assert await tools.call("greet", {"name": "Ada"}) == "Hello, Ada"
    assert await tools.call("greet", {"name": "\ud800"}) == "Hello, \\ud800"
    assert await tools.call("lookup", {"key": "k"}) == "{'key': 'k', 'found': None}"


async def test_a_list_comes_with_its_text(pool: ToolPool) -> None:
    tools = await tools_of(pool, "rows")
    assert await tools.call("rows", {"last": 1}) == ListResult("[('a', 1), None]", [["a", 1], None])
    for last in (10**30, float("nan")):
        assert str(await tools.call("rows", {"last": last})).startswith("[('a', ")
    assert await tools.call("rows", {"last": 10**30}) == f"[('a', {10**30}), None]", "it cannot be sent"


async def test_all_async_calls_of_a_worker_share_an_event_loop(pool: ToolPool) -> None:
    tools = await tools_of(pool, "count_loops")
    assert [await tools.call("count_loops", {}) for _ in range(2)] == ["1", "1"]


async def test_the_model_gets_the_error_of_a_tool_and_the_worker_goes_on(
    pool: ToolPool, workers: CountedWorkers
) -> None:
    tools = await tools_of(pool, "fails", "fails_later", "exits", "multiply")
    for name, arguments, says in (
        ("fails", {"why": "no such city"}, "no such city"),
        ("fails_later", {"why": "no such city"}, "no such city"),
        ("fails", {"why": ""}, "ValueError"),
        ("exits", {}, "3"),
        ("nothing", {}, "Tool nothing not found."),
        ("multiply", {"a": 1, "c": 2}, "multiply() got an unexpected keyword argument 'c'"),
        ("multiply", {}, "multiply() missing 1 required positional argument: 'a'"),
    ):
        with pytest.raises(ToolError) as raised:
            await tools.call(name, arguments)
        assert str(raised.value) == says
    assert not workers.replaced


async def test_a_tool_that_finds_no_memory_says_so_and_its_worker_is_replaced(
    pool: ToolPool, workers: CountedWorkers
) -> None:
    tools = await tools_of(pool, "hog")
    with pytest.raises(ToolError) as raised:
        await tools.call("hog", {})
    assert str(raised.value) == "MemoryError (a worker has 8192 MiB of address space: HEADRACE_WORKER_MEMORY_MIB)"
    await eventually(lambda: workers.replaced == {"renewed": 1})


async def test_an_error_with_the_model_s_words_in_its_message_is_logged_once(
    pool: ToolPool, caplog: pytest.LogCaptureFixture
) -> None:
    tools = await tools_of(pool, "fails")
    for why in ("no such city", "no such street"):
        with pytest.raises(ToolError, match=why):
            await tools.call("fails", {"why": why})
    (logged,) = [record.getMessage() for record in caplog.records if "(logged once)" in record.getMessage()]
    assert "no such city" in logged


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
async def test_a_tool_that_hangs_is_killed_and_costs_only_its_own_call(
    pool: ToolPool, workers: CountedWorkers, name: str
) -> None:
    hanging = await tools_of(pool, name, tool_timeout_s=1.0)
    with pytest.raises(ToolLostError, match=f"tool {name}: took longer than 1 s and was killed"):
        await hanging.call(name, {})
    assert workers.replaced == {"timeout": 1}
    tools = await tools_of(pool, "multiply")
    assert await tools.call("multiply", {"a": 2}) == "4"


async def test_a_tool_that_ends_its_worker_has_no_result(pool: ToolPool, workers: CountedWorkers) -> None:
    tools = await tools_of(pool, "crashes", "multiply")
    with pytest.raises(ToolLostError, match="tool crashes: its worker process died twice: it ended with exit status 7"):
        await tools.call("crashes", {})
    assert workers.replaced == {"died": 2}
    assert await tools.call("multiply", {"a": 2}) == "4"


async def test_a_long_result_is_cut_and_says_so(pool: ToolPool) -> None:
    tools = await tools_of(pool, "floods", "prints")
    assert await tools.call("floods", {"num_characters": MAX_RESULT_CHARS}) == "x" * MAX_RESULT_CHARS
    cut = await tools.call("floods", {"num_characters": 100_000_000})
    says = "\n[The first 262144 of 100000000 characters. The rest was cut.]"
    assert cut == "x" * 262144 + says
    assert await tools.call("prints", {"num_characters": 1_000_000}) == "printed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os:system", "tool functions cannot come from os: os is part of Python's standard library"),
        ("nowhere:f", "the operator must name it in HEADRACE_TOOL_MODULES (now: none)"),
        ("tools_under_test:multipy", "Did you mean multiply?"),
        ("tools_under_test:os", "is not a function"),
        ("multiply", "'multiply' is not of the form 'package.module:function'"),
        ("tools_under_test:without_docstring", "write a docstring in Google's format"),
        ("tools_under_test:without_argument_in_docstring", "the docstring has no description for the argument 'a'"),
        ("tools_under_test:without_type_hint", "give each argument a type hint"),
    ],
)
async def test_a_function_that_cannot_be_a_tool_is_refused_with_what_to_do(
    pool: ToolPool, name: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        await UserTools.load([name], pool, lane="run-test", tool_timeout_s=1.0, check_timeout_s=240.0)
    assert says in str(refused.value)


async def test_two_tools_of_one_name_are_refused(pool: ToolPool, tmp_path: Path) -> None:
    (tmp_path / "other_tools.py").write_text('def multiply():\n    """Do it differently."""\n')
    with pytest.raises(UserError, match="2 tools are called multiply, and the model could not tell them apart"):
        await tools_of(pool, "multiply", "other_tools:multiply")


async def test_a_run_keeps_the_version_of_its_tools_when_their_file_is_edited(pool: ToolPool, tmp_path: Path) -> None:
    module = tmp_path / "edited_tools.py"
    code = 'def which() -> str:\n    """Return the version."""\n    return "{}"\n'
    module.write_text(code.format("first"))
    first = await tools_of(pool, "edited_tools:which")
    module.write_text(code.format("second"))
    second = await tools_of(pool, "edited_tools:which")
    assert [await tools.call("which", {}) for tools in (first, second, first)] == ["first", "second", "first"]
