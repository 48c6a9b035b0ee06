"""A failing reward function affects only its own outcomes. Real worker processes."""

import asyncio
import hashlib
import os
import time
from pathlib import Path

import msgspec
import pytest

from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.user_code.places import Places
from tests.rewarder.conftest import (
    LIMITS,
    TASKS,
    call_with,
    descendants,
    is_running,
    is_worker,
    pool_and_scorer,
    until,
    user,
    wait_for,
)
from tests.rewarder.scoring_rig import outcomes_of


@pytest.mark.parametrize("what", ["no_text", "nested_without_end", "too_few", "without_a_value", "no_number"])
async def test_only_the_function_that_answers_in_the_place_of_its_worker_fails(what: str, scorer: Scorer) -> None:
    call = call_with("42", "41", answer="42")
    rows = await outcomes_of(scorer, f"forging_rewards:{what}", user("exact"), call=call)
    assert [[(o.outcome, o.value) for o in row] for row in rows] == [
        [("error", None), ("scored", 1.0)],
        [("error", None), ("scored", 0.0)],
    ]


async def test_a_conversation_arrives_as_messages(scorer: Scorer) -> None:
    call = RewardCall(
        prompts=[[{"role": "user", "content": "6 * 7?"}]] * 2,
        completions=[[{"role": "assistant", "content": "42"}], [{"role": "assistant", "content": "7"}]],
        columns={},
    )
    rows = await outcomes_of(scorer, user("roles"), call=call)
    assert [row[0].value for row in rows] == [1.0, 0.0]


async def test_a_function_without_kwargs_gets_only_what_it_names(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("without_kwargs"), call=call_with("a", answer="42"))
    assert rows[0][0].value == 0.5


async def test_values_that_a_function_logs_arrive_with_its_outcomes(scorer: Scorer) -> None:
    call = msgspec.structs.replace(
        call_with("a", "b", answer="42"),
        completion_ids=[pack_ids([1]), pack_ids([1, 2])],
        trainer_state=TrainerState(global_step=3, max_steps=9),
    )
    rows = await outcomes_of(scorer, user("everything"), call=call)
    assert [(row[0].value, row[0].metrics, row[0].extra) for row in rows] == [
        (1.0, {"seen": 1.0}, {"seen": "a"}),
        (2.0, {"seen": 1.0}, {"seen": "b"}),
    ]


async def test_the_trace_of_a_user_s_error_is_logged_once_and_never_travels(
    scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        rows = await outcomes_of(scorer, user("raises"), call=call_with("a"))
        assert "Traceback" not in rows[0][0].detail
    logged = [record.getMessage() for record in caplog.records if "ValueError" in record.getMessage()]
    assert len(logged) == 1
    assert "rewards_under_test.py" in logged[0]
    assert "reward_worker.py" not in logged[0], "headrace's own frames do not help a user"


@pytest.mark.parametrize("name", ["cannot_parse", "cannot_parse_async"])
async def test_an_error_with_the_completion_in_its_message_is_logged_once_and_cut(
    scorer: Scorer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    for letter in "ab":
        rows = await outcomes_of(scorer, user(name), call=call_with(letter * 1_000_000))
        assert rows[0][0].detail.startswith(f"ValueError: cannot parse {letter}")
    (logged,) = [record.getMessage() for record in caplog.records if "ValueError" in record.getMessage()]
    assert len(logged) < 20_000
    assert "rewards_under_test.py" in logged
    assert logged.rstrip().endswith(", which ends here")


@pytest.mark.parametrize("name", ["exits", "exits_async"])
async def test_a_function_that_calls_exit_ends_neither_worker_nor_service(scorer: Scorer, name: str) -> None:
    rows = await outcomes_of(scorer, user(name), user("one"), call=call_with("a"))
    assert (rows[0][0].outcome, rows[0][0].detail) == ("error", "SystemExit: 3")
    assert rows[0][1].value == 1.0


async def test_an_async_function_that_cancels_itself_is_an_error(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("cancels_itself"), call=call_with("a"))
    assert (rows[0][0].outcome, rows[0][0].detail) == ("error", "cancelled itself")


async def test_a_function_that_kills_its_process_is_an_error_and_the_worker_is_replaced(
    scorer: Scorer, pool: RewardPool
) -> None:
    rows = await outcomes_of(scorer, user("crashes"), call=call_with("a"))
    assert rows[0][0].outcome == "error"
    assert rows[0][0].detail == "its worker process died twice: it ended with exit status 7"
    for _ in range(4):
        rows = await outcomes_of(scorer, user("one"), call=call_with("a"))
        assert rows[0][0].value == 1.0

    async def are_two() -> bool:
        return pool.num_alive == 2

    await until(are_two, what="the replacement")


async def test_the_exit_code_is_the_process_s_own_while_others_are_started(scorer: Scorer) -> None:
    """Process.start reads the exit codes of ended processes. A second reader of an exit code gets 255."""
    calls = (outcomes_of(scorer, user("crashes"), call=call_with("a")) for _ in range(100))
    details = [rows[0][0].detail for rows in await asyncio.gather(*calls)]
    assert {detail: details.count(detail) for detail in details} == {
        "its worker process died twice: it ended with exit status 7": 100
    }


async def test_a_hanging_function_is_killed_at_its_deadline_with_its_children_and_delays_no_other(
    scorer: Scorer, pool: RewardPool, metrics: RewarderMetrics, tmp_path: Path
) -> None:
    await outcomes_of(scorer, user("one"), user("step_as_reward"), call=call_with("a"))
    await outcomes_of(scorer, user("hangs"), call=call_with("a"), timeout_s=0.1)
    hanging = asyncio.create_task(outcomes_of(scorer, user("hangs"), call=call_with("a"), timeout_s=600.0))
    neighbours = [await outcomes_of(scorer, user("one"), user("step_as_reward"), call=call_with("a")) for _ in range(5)]
    assert not hanging.done(), "the neighbours waited for the hanging function"
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    pid_file = tmp_path / "pids"
    started_at = time.monotonic()
    rows = await outcomes_of(scorer, user("hangs"), call=call_with("a", "b", pid_file=str(pid_file)), timeout_s=10.0)
    hanging_s = time.monotonic() - started_at
    assert all([outcome.value for outcome in rows_of_one[0]] == [1.0, 3.0] for rows_of_one in neighbours)
    assert [(row[0].outcome, row[0].value) for row in rows] == [("timeout", None)] * 2
    assert rows[0][0].detail == "took longer than 10 s and was killed"
    assert 10.0 <= hanging_s < 100.0
    worker, grandchild = (int(pid) for pid in pid_file.read_text().split())
    wait_for(lambda: not is_running(worker) and not is_running(grandchild), what="the end of worker and grandchild")
    assert metrics.registry.get_sample_value("headrace_reward_worker_kills_total", {"reason": "timeout"}) == 2.0
    rows = await outcomes_of(scorer, user("one"), call=call_with("a"))
    assert rows[0][0].value == 1.0


async def test_a_list_of_the_wrong_length_is_invalid_for_every_completion(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("one_too_few"), call=call_with("a", "b", "c"))
    assert [row[0].outcome for row in rows] == ["invalid"] * 3
    assert rows[0][0].detail == "returned 2 rewards for 3 completions; return one for each"


async def test_a_missing_column_is_named(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, user("exact"), call=call_with("a", solution="42"))
    assert rows[0][0].outcome == "error"
    assert rows[0][0].detail.startswith("needs 'answer', and there is no such column; the columns are: solution.")


async def test_a_missing_function_is_an_error_for_every_completion(scorer: Scorer) -> None:
    rows = await outcomes_of(scorer, "no_such_module:f", user("oen"), user("one"), call=call_with("a", "b"))
    for absent, misspelt, there in rows:
        assert absent.outcome == misspelt.outcome == "error"
        assert absent.detail.startswith("no module named no_such_module: put no_such_module.py into one of the direct")
        assert "has no function oen. Did you mean one? It has: one, exact," in misspelt.detail
        assert there.value == 1.0


async def test_async_functions_run_at_the_same_time_or_two_that_wait_for_each_other_would_never_end(
    scorer: Scorer,
) -> None:
    call = call_with("a", meeting="here")
    rows = await outcomes_of(scorer, user("meets_another"), user("meets_one"), call=call, timeout_s=10)
    assert [outcome.value for outcome in rows[0]] == [1.0, 2.0]


async def test_sync_functions_run_at_the_same_time_or_two_that_wait_for_each_other_would_never_end(
    scorer: Scorer, tmp_path: Path
) -> None:
    call = call_with("a", directory=str(tmp_path))
    rows = await outcomes_of(scorer, user("meets_left"), user("meets_right"), call=call, timeout_s=10)
    assert [outcome.value for outcome in rows[0]] == [1.0, 2.0]


async def test_a_pathological_answer_is_a_timeout_and_its_neighbours_are_judged(scorer: Scorer, tmp_path: Path) -> None:
    meeting = call_with("a", directory=str(tmp_path))  # so that two workers have started, and imported the module
    await outcomes_of(scorer, user("meets_left"), user("meets_right"), call=meeting, timeout_s=60)
    call = call_with(r"\boxed{42}", r"\boxed{100000000!}", r"\boxed{41}", answer="42")
    slow = asyncio.create_task(outcomes_of(scorer, "accuracy_reward", call=call, timeout_s=200))
    fast = await outcomes_of(scorer, user("one"), call=call_with("a"))
    assert not slow.done(), "a plain reward waited for a pathological one"
    rows = await slow
    assert [(row[0].outcome, row[0].value) for row in rows] == [("scored", 1.0), ("timeout", None), ("scored", 0.0)]
    assert fast[0][0].value == 1.0


async def test_a_changed_file_runs_its_new_code_after_the_next_check(metrics: RewarderMetrics, tmp_path: Path) -> None:
    file = tmp_path / "changing_rewards.py"
    sync, on_loop = "changing_rewards:sync", "changing_rewards:on_loop"
    source = "def sync(**_): return [{0}]\nasync def on_loop(**_): return [{0}]\n"
    tasks = RewardTasks(Places((str(tmp_path),)))
    async with pool_and_scorer(metrics, tasks) as (_, scorer):
        file.write_text(source.format("1.0"))
        assert all(what.__class__.__name__ == "Inspected" for what in (await scorer.check([sync, on_loop])).values())
        rows = await outcomes_of(scorer, sync, on_loop, call=call_with("a"))
        assert [outcome.value for outcome in rows[0]] == [1.0, 1.0]
        file.write_text(source.format("2.125"))
        await scorer.check([sync, on_loop])
        rows = await outcomes_of(scorer, sync, on_loop, call=call_with("a"))
        assert [outcome.value for outcome in rows[0]] == [2.125, 2.125]


async def test_no_worker_imports_an_edited_file_before_a_check_and_all_do_afterwards(
    metrics: RewarderMetrics, tmp_path: Path
) -> None:
    file = tmp_path / "rewards_that_change.py"
    sync, crashes, late, on_loop = (f"rewards_that_change:{name}" for name in ("sync", "crashes", "late", "on_loop"))
    source = (
        "import os\ndef sync(**_): return [{0}]\ndef crashes(**_): os._exit(7)\n"
        "def late(**_): return [{0}]\nasync def on_loop(**_): return [{0}]\n"
    )
    tasks = RewardTasks(Places((str(tmp_path),)))
    versions = [hashlib.sha256(source.format(value).encode()).hexdigest()[:12] for value in ("1.0", "3.0625")]

    async with pool_and_scorer(metrics, tasks) as (_, scorer):
        file.write_text(source.format("1.0"))
        await scorer.check([sync, crashes, on_loop])
        rows = await outcomes_of(scorer, sync, call=call_with("a"))
        assert (rows[0][0].value, rows[0][0].version) == (1.0, versions[0])

        file.write_text("this is no python")
        for _ in range(2):  # both workers are replaced
            await outcomes_of(scorer, crashes, call=call_with("a"))
        # on_loop was never imported here and late was never called. Both come from the version that was checked.
        rows = await outcomes_of(scorer, sync, on_loop, late, call=call_with("a"))
        assert [(outcome.value, outcome.version) for outcome in rows[0]] == [(1.0, versions[0])] * 3

        file.write_text(source.format("3.0625"))
        await scorer.check([late])
        rows = await outcomes_of(scorer, sync, on_loop, late, call=call_with("a"))
        assert [(outcome.value, outcome.version) for outcome in rows[0]] == [(3.0625, versions[1])] * 3


@pytest.mark.parametrize(
    ("name", "failed"),
    [("hangs", "timeout"), ("hangs_async", "timeout"), ("crashes", "error"), ("cancels_itself", "error")],
)
async def test_a_failed_outcome_has_its_version_too(scorer: Scorer, name: str, failed: str) -> None:
    (answered,) = (await outcomes_of(scorer, user("one"), call=call_with("a")))[0]
    timeout_s = 0.5 if failed == "timeout" else 120.0
    (outcome,) = (await outcomes_of(scorer, user(name), call=call_with("a"), timeout_s=timeout_s))[0]
    assert outcome.outcome == failed
    assert answered.version != ""
    assert outcome.version == answered.version


async def test_closing_the_pool_leaves_no_worker(metrics: RewarderMetrics) -> None:
    before = descendants(os.getpid())
    async with RewardPool(
        TASKS, num_workers=2, limits=LIMITS, queue_timeout_s=5, import_timeout_s=5, metrics=metrics
    ) as pool:
        assert pool.num_alive == 2
        hanging = asyncio.create_task(pool.call(user("hangs"), _encoded(call_with("a")), lane="x", timeout_s=60))
        wait_for(lambda: len(descendants(os.getpid()) - before) >= 2, what="two workers")
        workers = descendants(os.getpid()) - before
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    wait_for(lambda: not any(is_worker(pid) for pid in workers), what="the end of the workers")


def _encoded(call: RewardCall) -> bytes:
    return msgspec.msgpack.encode(call)
