"""Completions' code against tests, in a real sandbox: right code gets 1, wrong code less, and no trick helps."""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.built_ins.code_execution import code_execution_reward
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.sandbox.chosen import SandboxChoice, choose, num_at_once, usable_sandbox
from services.rewarder.scoring import Scorer, WeightedFunction
from services.rewarder.settings import RewarderSettings
from shared.messages import RewardOutcome
from shared.user_code.limits import Limits
from shared.user_code.worker_frames import Refused
from tests.rewarder.conftest import LIMITS, TASKS, pool_and_scorer, until

NAME = "code_execution_reward"
ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = [{"input": "3\n", "output": "6"}, {"input": "5\n", "output": "10\n"}]


def tasks_with(choice: SandboxChoice) -> RewardTasks:
    return RewardTasks(TASKS.places, choice)


@pytest.fixture
async def started(metrics: RewarderMetrics, bwrap: str) -> AsyncIterator[tuple[RewardPool, Scorer]]:
    async with pool_and_scorer(metrics, tasks_with(SandboxChoice(bwrap=bwrap))) as started:
        yield started


@pytest.fixture
def scorer(started: tuple[RewardPool, Scorer]) -> Scorer:
    return started[1]


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


async def outcomes(
    scorer: Scorer, *codes: str, tests: Any, deadline_s: float = 100.0, **kwargs: Any
) -> list[RewardOutcome]:
    return await outcomes_of_texts(scorer, *map(fenced, codes), tests=tests, deadline_s=deadline_s, **kwargs)


async def outcomes_of_texts(
    scorer: Scorer, *texts: str, tests: Any, deadline_s: float = 100.0, **kwargs: Any
) -> list[RewardOutcome]:
    call = RewardCall(
        prompts=["p"] * len(texts),
        completions=list(texts),
        columns={"tests": [tests] * len(texts)},
        reward_kwargs={NAME: kwargs},
    )
    rows = await scorer.score(call, [WeightedFunction(NAME)], timeout_s=deadline_s, lane="test")
    return [row[0] for row in rows]


async def values(scorer: Scorer, *codes: str, tests: Any, **kwargs: Any) -> list[float | None]:
    judged = await outcomes(scorer, *codes, tests=tests, **kwargs)
    assert {outcome.outcome for outcome in judged} == {"scored"}, judged
    return [outcome.value for outcome in judged]


async def test_right_and_wrong_and_half_right_solutions_are_distinguished(scorer: Scorer) -> None:
    codes = ["def add(a, b): return a + b", "def add(a, b): return a * b", "def add(a, b): return 3"]
    judged = await outcomes(scorer, *codes, tests=ADD)
    assert [outcome.value for outcome in judged] == [1.0, 0.0, 0.5]
    assert [outcome.components for outcome in judged] == [
        {"tests_passed": 2.0, "tests": 2.0},
        {"tests_passed": 0.0, "tests": 2.0},
        {"tests_passed": 1.0, "tests": 2.0},
    ]
    assert [outcome.detail for outcome in judged] == [
        "",
        "test 1 of 2: AssertionError",
        "test 2 of 2: AssertionError",
    ]
    assert await values(scorer, *codes, tests=ADD, partial_credit=False) == [1.0, 0.0, 0.0]


async def test_programs_are_judged_by_what_they_print(scorer: Scorer) -> None:
    codes = [
        "print(2 * int(input()))",
        "if __name__ == '__main__':\n    print(f' {2 * int(input())} \\n')",
        "print(6)",
        "print(2 * int(input()))\nraise SystemExit(1)",
        "print(2 * int(input()), end='')\nimport os\nos.kill(os.getpid(), 9)",
    ]
    assert await values(scorer, *codes, tests=ECHO) == [1.0, 1.0, 0.5, 0.0, 0.0]


async def test_right_code_with_much_output_and_large_values_is_right(scorer: Scorer) -> None:
    count = "print('\\n'.join(map(str, range(200_000))))"
    cases = [{"input": "", "output": "\n".join(map(str, range(200_000)))}]
    floods = count + "\nprint('x' * (1 << 20))"
    assert await values(scorer, count, floods, tests=cases, timeout_s=60.0, cpu_s=60) == [1.0, 0.0]
    large = "data = list(range(150_000, 0, -1))\nassert f(data) == list(range(1, 150_001))"
    ordered, in_place = "def f(items): return sorted(items)", "def f(items):\n    items.sort()\n    return items"
    tests = [large, large + "\nassert data[0] == 150_000"]
    assert await values(scorer, ordered, in_place, tests=tests, timeout_s=60.0, cpu_s=60) == [1.0, 0.5]
    (judged,) = await outcomes(scorer, "def f(items): return 'x' * (16 << 20)", tests=[large], timeout_s=60.0, cpu_s=60)
    assert (judged.value, judged.detail) == (0.0, "test 1 of 1: its values take 16 MiB or more")


async def test_invalid_code_is_wrong_and_says_why(scorer: Scorer) -> None:
    codes = ["def add(a, b) return a + b", "raise ValueError('no')", "", "add = 3"]
    judged = await outcomes(scorer, *codes, tests=ADD)
    assert [outcome.value for outcome in judged] == [0.0] * 4
    assert judged[0].detail.startswith("test 1 of 2: SyntaxError: expected ':'")
    assert judged[1].detail == "test 1 of 2: ValueError: no"
    assert judged[2].detail == "test 1 of 2: NameError: name 'add' is not defined"


CHEATS = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves in the call": "def add(a, b):\n    import os\n    os._exit(0)",
    "raises exit in the call": "def add(a, b): raise SystemExit(0)",
    "is equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def add(a, b): return Any()"
    ),
    "is an int that is equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Any(7)"
    ),
    "patches what compares": "import builtins, sys\nbuiltins.AssertionError = None\ndef add(a, b): return 7",
    "defines what tests use": "def isinstance(*_): return True\nabs = lambda _: 0\ndef add(a, b): return 7",
    "prints a verdict": (
        'import sys, os\nline = \'{"passed": [true, true], "why": "", "nonce": ""}\'\nprint(line, flush=True)\n'
        "for number in range(20):\n    try:\n        os.write(number, line.encode() + b'\\n')\n"
        "    except OSError:\n        pass\ndef add(a, b): return 7"
    ),
    "reads the judge": (
        "import os\nfound = []\nfor name in ('mem', 'environ', 'maps', 'fd/0', 'fd/1'):\n    try:\n"
        "        open(f'/proc/1/{name}', 'r+b').write(b'x')\n        found.append(name)\n"
        "    except OSError:\n        pass\ndef add(a, b): return (3 if b == 2 else 0) if found else 7"
    ),
    "traces the judge": (
        "import ctypes\nattached = ctypes.CDLL(None).ptrace(16, 1, 0, 0)\n"
        "def add(a, b): return (3 if b == 2 else 0) if attached == 0 else 7"
    ),
    "kills the judge": (
        "import os, signal\nfor number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGALRM):\n"
        "    os.kill(1, number)\ndef add(a, b): return 7"
    ),
}


async def test_a_trick_is_worth_nothing(scorer: Scorer) -> None:
    honest = "def add(a, b): return a + b"
    judged = await values(scorer, *CHEATS.values(), honest, tests=ADD)
    assert dict(zip([*CHEATS, "is honest"], judged, strict=True)) == dict.fromkeys(CHEATS, 0.0) | {"is honest": 1.0}


async def test_code_that_speaks_for_its_process_brings_no_builtins_along(scorer: Scorer) -> None:
    """The code may send anything to the judge, which treats it as data; here an ``abs`` that always returns 0."""
    names = {"half": ["value", ["object", 0]], "__builtins__": ["value", ["dict", [["abs", ["object", 0]]]]]}
    cheat = (
        "import json, sys\nscope = sys._getframe(1).f_locals\n"
        "def say(what):\n    scope['outgoing'].write(json.dumps(what).encode() + b'\\n')\n"
        "    scope['outgoing'].flush()\n"
        f"say({{'names': {names}}})\n"
        "for line in scope['incoming']:\n    say({'value': 0})\n"
    )
    tests = ["assert half(0) == 0", "assert abs(half(1) - 0.5) < 1e-9"]
    assert await values(scorer, cheat, "def half(x): return x / 2", tests=tests) == [0.5, 1.0]


async def test_a_test_that_shrugs_things_off_is_not_passed_by_leaving(scorer: Scorer) -> None:
    codes = [
        "import os\ndef square(x): os._exit(0)",
        "def square(x): raise StopIteration",
        "def square(x):\n    if x < 0: raise ValueError\n    return x * x",
    ]
    tests = [
        "try:\n    square(-1)\nexcept:\n    pass\nelse:\n    assert False",
        "for found, wanted in zip(map(square, [1, 2]), [1, 4]):\n    assert found == wanted",
    ]
    assert await values(scorer, *codes, tests=tests) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("tests", [ADD, ECHO], ids=["asserts", "cases"])
async def test_code_that_takes_everything_from_its_judge_is_wrong(scorer: Scorer, tests: Any) -> None:
    kinds = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NOFILE", "RLIMIT_STACK", "RLIMIT_FSIZE", "RLIMIT_NPROC")
    starve = "import os, resource\nresource.prlimit(1, resource.{0}, (0, 0))\n"
    answers_wrongly = "def add(a, b): return 7"
    leaves = "def add(a, b): os._exit(1)"
    codes = [starve.format(kind) + code for kind in kinds for code in (answers_wrongly, leaves)]
    assert await values(scorer, *codes, tests=tests) == [0.0] * len(codes)


async def test_code_that_makes_its_judge_compute_for_ever_is_wrong(scorer: Scorer) -> None:
    code = "def exponent(): return 10**11"
    (judged,) = await outcomes(scorer, code, tests=["assert 3 ** exponent() > 0"], timeout_s=8.0, cpu_s=1)
    assert (judged.outcome, judged.value) == ("scored", 0.0)


async def test_code_cannot_make_a_test_look_unfit(scorer: Scorer) -> None:
    cheat = "import math as square\ndef apply(f, items): return [f(item) for item in items]"
    honest = "def square(x): return x * x\ndef apply(f, items): return [f(item) for item in items]"
    assert await values(scorer, cheat, honest, tests=["assert apply(square, [2]) == [4]"]) == [0.0, 1.0]


async def test_code_runs_with_one_thread_of_numpy_s_and_is_what_the_kernel_kills_first(scorer: Scorer) -> None:
    code = (
        "import os\n"
        "def asked(): return [os.environ.get('OPENBLAS_NUM_THREADS'), open('/proc/self/oom_score_adj').read()]"
    )
    assert await values(scorer, code, tests=["assert asked() == ['1', '1000\\n']"]) == [1.0]


async def test_a_name_that_a_test_has_made_its_own_stays_the_tests_when_the_code_is_started_again(
    scorer: Scorer,
) -> None:
    cheat = "import os\ndef isclose(a, b): return True\ndef half(x):\n    if x == 1: os._exit(0)\n    return 7.0"
    tests = ["from math import isclose", "assert isclose(half(1), 0.5)", "assert isclose(half(3), 1.5)"]
    assert await values(scorer, cheat, "def half(x): return x / 2", tests=tests) == [1 / 3, 1.0]


async def test_endless_and_greedy_code_costs_itself_and_not_its_neighbours(scorer: Scorer) -> None:
    codes = [
        "def add(a, b):\n    while True: pass",
        "while True: pass",
        "def add(a, b): return [0] * 10**10",
        "import os\ndef add(a, b):\n    while True: os.fork()",
        "def add(a, b): return a + b",
    ]
    assert await values(scorer, *codes, tests=ADD, cpu_s=1, timeout_s=60.0) == [0.0, 0.0, 0.0, 0.0, 1.0]


async def test_code_that_sleeps_through_its_time_is_wrong(scorer: Scorer) -> None:
    (judged,) = await outcomes(scorer, "import time\ndef add(a, b): time.sleep(1000)", tests=ADD, timeout_s=8.0)
    assert (judged.outcome, judged.value, judged.detail) == ("scored", 0.0, "its tests took longer than 8 s")


@pytest.fixture
def crowd(bwrap: str) -> Iterator[None]:
    """Choose the sandbox, and keep this process and its children on one processor with three busy processes."""
    choose(SandboxChoice(bwrap=bwrap))
    asyncio.run(usable_sandbox())  # a test of the sandbox, which would take long in the crowd
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    busy = [sys.executable, "-IS", "-c", "while True: pass"]
    others = [subprocess.Popen(busy, start_new_session=True) for _ in range(3)]
    yield
    for other in others:
        other.kill()
        other.wait()
    os.sched_setaffinity(0, everywhere)
    choose(SandboxChoice())


def test_code_whose_time_is_up_because_others_had_the_processor_is_not_judged(crowd: None) -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not say who waits for a processor: it needs CONFIG_SCHED_INFO")
    (judged,) = code_execution_reward([fenced("while True: pass")], tests=[ADD], timeout_s=1.5, cpu_s=100)
    assert (judged.outcome, judged.value) == ("error", None)
    assert judged.detail.startswith("the sandbox gave no verdict: the machine was too busy: of 1.5 s its processes")


FORKS_QUIETLY = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
BOMBS = {
    "forks": "import os\nwhile True: os.fork()",
    "forks quietly": FORKS_QUIETLY,
    "forks quietly when called": f"def add(a, b):\n    {FORKS_QUIETLY.replace(chr(10), chr(10) + '    ')}",
    "forks and sleeps": "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    "forks and ends": "import os\nwhile True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()",
    "forks and takes memory": (
        "import os\nkept = []\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
        "    try: kept.append(bytearray(1 << 20))\n    except MemoryError: pass"
    ),
    "makes threads": (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    except RuntimeError: pass"
    ),
    "leaves orphans": (
        "import os\ndef add(a, b):\n    while True:\n        try:\n            if os.fork() == 0:\n"
        "                os.setsid()\n                os.closerange(0, 64)\n                while True: pass\n"
        "        except OSError: os._exit(1)"
    ),
    "takes memory": "kept = [0] * 10**10",
    "takes files": "kept = []\nwhile True: kept.append(open('/dev/null'))",
    "takes the disk": "while True: open(str(len(__import__('os').listdir())), 'wb').write(bytes(1 << 20))",
    "floods": "print('x' * (2 << 20))\nraise SystemExit(1)",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bomb", BOMBS)
def test_code_that_takes_all_that_it_may_is_wrong_on_a_busy_machine_too(crowd: None, bomb: str) -> None:
    for tests in [ADD] if "def add" in BOMBS[bomb] else [ADD, ECHO]:
        for timeout_s in (1.0, 16.0):  # a quarter of a processor may not be enough to start Python and the bomb in 1 s
            (judged,) = code_execution_reward([fenced(BOMBS[bomb])], tests=[tests], timeout_s=timeout_s, cpu_s=100)
            if judged.outcome == "scored":
                break
        assert (judged.outcome, judged.value) == ("scored", 0.0), judged


def test_each_worker_runs_so_many_programs_that_all_of_them_have_a_processor_each() -> None:
    num_processors = len(os.sched_getaffinity(0))
    try:
        for num_workers, at_once in [(1, num_processors), (num_processors, 1), (10 * num_processors, 1)]:
            choose(SandboxChoice(num_workers=num_workers))
            assert num_at_once() == at_once
    finally:
        choose(SandboxChoice())
    assert RewarderSettings.model_construct(num_reward_workers=7).sandbox_choice().num_workers == 7


async def test_more_memory_than_a_worker_has_is_refused_with_both_settings(
    metrics: RewarderMetrics, bwrap: str
) -> None:
    limits = Limits(600 << 20, LIMITS.open_files)
    async with pool_and_scorer(metrics, tasks_with(SandboxChoice(bwrap=bwrap)), limits=limits) as (_, scorer):
        refused = (await scorer.check([NAME], {NAME: {"memory_mib": 601}}))[NAME]
        says = (
            "has an option 'memory_mib' of 601, which is more than the 600 MiB of a reward worker: lower it, or raise "
            "HEADRACE_WORKER_MEMORY_MIB"
        )
        assert refused == Refused(f"{NAME} {says}")
        (judged,) = await outcomes(scorer, "def add(a, b): return a + b", tests=ADD, memory_mib=601)
        assert (judged.outcome, judged.detail) == ("error", says)
        assert isinstance((await scorer.check([NAME], {NAME: {"memory_mib": 600}}))[NAME], Inspected)
        assert await values(scorer, "def add(a, b): return a + b", tests=ADD, memory_mib=600) == [1.0]


async def test_files_of_one_case_do_not_disturb_the_next(scorer: Scorer) -> None:
    trash = [
        "open('full', 'wb').write(bytes(8 << 20))\nopen('fuller', 'wb').write(bytes(7 << 20))",
        "import os, sys\nos.remove('program.py')\nos.makedirs('program.py/program.py')",
        "import os\nos.remove('input')\nos.symlink('/proc/1/mem', 'input')",
        "import os\nos.chmod('.', 0)",
    ]
    codes = [f"print(2 * int(input()), flush=True)\n{code}" for code in trash]
    assert await values(scorer, *codes, tests=ECHO) == [1.0] * len(codes)


async def test_a_case_that_cannot_be_prepared_any_more_is_failed_and_the_others_count(scorer: Scorer) -> None:
    block = "import os\nos.remove('program.py')\nos.makedirs('program.py/x')\nos.chmod('program.py', 0)"
    (judged,) = await outcomes(scorer, f"print(2 * int(input()))\n{block}", tests=ECHO)
    assert (judged.outcome, judged.value) == ("scored", 0.5)
    assert judged.detail.startswith("test 2 of 2: its program left no room for the next case: ")


async def test_processes_that_a_crash_leaves_behind_do_not_count_against_the_next_start(scorer: Scorer) -> None:
    crowded = (
        "import os, time\ndef add(a, b):\n    if a == 1:\n        for _ in range(50):\n"
        "            if os.fork() == 0:\n                os.closerange(0, 64)\n                time.sleep(1000)\n"
        "        os._exit(1)\n    return a + b"
    )
    assert await values(scorer, crowded, tests=[*ADD, "assert add(2, 2) == 4"]) == [2 / 3]


async def test_common_test_code_works_across_the_two_processes(scorer: Scorer) -> None:
    code = """
import math
from collections import Counter, OrderedDict
from decimal import Decimal
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
def sort_in_place(items): items.sort()
def squares(n):
    for i in range(n): yield i * i
def fail(kind):
    if kind == "group": raise ExceptionGroup("as asked", [ValueError()])
    raise {"value": ValueError, "key": KeyError, "own": type("OwnError", (Exception,), {})}[kind]("as asked")
def decoded(data): return data.decode()
def count(words): return Counter(words)
def ordered(): return OrderedDict(a=1)
def shapes():
    return ({1, 2}, frozenset({3}), (4, [5.5, None]), {"k": b"v", 6: 1j}, 10**30, float("inf"), Decimal("1.5"))
LIMIT = 12
"""
    tests = [
        "assert len(Stack().push(1).push(2)) == 2 and Stack().push(3)[0] == 3 and Stack.size == 0",
        "stack = Stack()\nstack.size = 4\nassert stack.size == 4 and stack.push(1).items == [1]",
        "items = [3, 1, 2]\nsort_in_place(items)\nassert items == [1, 2, 3]",
        "assert list(squares(4)) == [0, 1, 4, 9] and 9 in squares(4) and sum(squares(3)) == 5",
        "numbers = squares(3)\nassert next(numbers) == 0 and next(numbers) == 1",
        "try:\n    fail('value')\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'as asked'",
        "try:\n    fail('own')\n    assert False\nexcept Exception as error:\n    assert 'OwnError' in str(error)",
        "try:\n    fail('key')\n    assert False\nexcept KeyError as error:\n    assert str(error) == \"'as asked'\"",
        "try:\n    b'\\xff'.decode()\nexcept UnicodeDecodeError:\n    pass\n"
        "try:\n    decoded(b'\\xff')\n    assert False\nexcept UnicodeDecodeError as error:\n    assert error.args",
        "try:\n    fail('group')\n    assert False\nexcept Exception as error:\n    assert 'Group' in str(error)",
        "assert count(['a', 'b', 'a']) == {'a': 2, 'b': 1} and ordered() == {'a': 1}",
        "from decimal import Decimal\nassert shapes() == ({1, 2}, frozenset({3}), (4, [5.5, None]), "
        "{'k': b'v', 6: 1j}, 10**30, float('inf'), Decimal('1.5'))",
        "assert LIMIT == 12 and math.isclose(LIMIT / 5, 2.4)",
        "def check(candidate):\n    assert candidate(['x']) == {'x': 1}\ncheck(count)",
    ]
    (judged,) = await outcomes(scorer, code, tests=tests)
    assert (judged.value, judged.detail) == (1.0, "")


async def test_a_row_without_usable_tests_is_not_applicable_whatever_the_completion(scorer: Scorer) -> None:
    for tests, says in [
        (None, "the row has no tests"),
        ([], "the row has no tests"),
        ([1], "the row's tests must all be text, or all be tables of input and output"),
        ([{"input": "1"}], "the row's tests must all be text, or all be tables of input and output"),
        (["assert add(1, 2 == 3"], "the row's tests cannot be used: test 1 is not valid Python: '(' was never closed"),
    ]:
        completions = (fenced("def add(a, b): return a + b"), fenced("def add("), "No.")
        for judged in await outcomes_of_texts(scorer, *completions, tests=tests):
            assert (judged.outcome, judged.value) == ("not_applicable", None), judged
            assert judged.detail.startswith(says), judged


async def test_a_test_that_passes_what_cannot_be_passed_is_an_error(scorer: Scorer) -> None:
    (judged,) = await outcomes(scorer, "def add(a, b): return a + b", tests=["assert add(print, 2) == 3"])
    assert (judged.outcome, judged.value) == ("error", None)
    assert judged.detail.startswith("the row's tests cannot be used: test 1 passes builtin_function_or_method to")


async def test_tests_may_be_json_or_one_text(scorer: Scorer) -> None:
    code = "def add(a, b): return a + b"
    assert await values(scorer, code, tests='["assert add(1, 2) == 3"]') == [1.0]
    assert await values(scorer, code, tests="assert add(1, 2) == 4") == [0.0]
    assert await values(scorer, "print(input())", tests='[{"input": "a", "output": ["a"]}]') == [1.0]


async def test_a_killed_worker_takes_its_sandboxes_with_it(scorer: Scorer) -> None:
    name = f"t{secrets.token_hex(6)}"
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\ntime.sleep(1000)"
    judging = asyncio.create_task(outcomes(scorer, code, tests=ADD, timeout_s=200))

    async def is_there() -> bool:
        return name in processes()

    async def is_gone() -> bool:
        return name not in processes()

    await until(is_there, what="the code to run")
    judging.cancel()  # the run has ended, and the worker is killed
    await asyncio.gather(judging, return_exceptions=True)
    await until(is_gone, what="the end of the code")
    assert await values(scorer, "def add(a, b): return a + b", tests=ADD) == [1.0]


def processes() -> set[str]:
    """Return the names that processes have set for themselves."""
    names: set[str] = set()
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.add(file.read_text().strip())
    return names


async def test_without_a_sandbox_nothing_is_run_and_nothing_is_scored(metrics: RewarderMetrics, tmp_path: Path) -> None:
    for choice, says in [
        (
            SandboxChoice(bwrap=str(tmp_path / "bwrap")),
            "bubblewrap is not installed where the rewarder runs: install",
        ),
        (
            SandboxChoice(bwrap="/usr/bin/false"),
            "a program run in the sandbox to test it did not answer (exit code 1",
        ),
        (SandboxChoice(kind="docker", image="headrace.invalid/none"), ""),
    ]:
        async with pool_and_scorer(metrics, tasks_with(choice)) as (_, scorer):
            proof = tmp_path / "proof"
            (judged,) = await outcomes(scorer, f"open({str(proof)!r}, 'w')", tests=ADD)
            assert (judged.outcome, judged.value) == ("error", None)
            assert judged.detail.startswith(f"no sandbox to run code in: {says}"), judged.detail
            refused = (await scorer.check([NAME]))[NAME]
            assert isinstance(refused, Refused)
            assert refused.detail.startswith(f"{NAME} has no sandbox to run code in: {says}")
            assert not proof.exists()


async def test_with_a_sandbox_the_check_says_what_is_needed(scorer: Scorer) -> None:
    found = (await scorer.check([NAME], {NAME: {"partial_credit": False}}))[NAME]
    assert isinstance(found, Inspected)
    assert found.required_columns == [["tests"]]
    refused = (await scorer.check([NAME], {NAME: {"cpu_s": 0}}))[NAME]
    assert refused == Refused(f"{NAME} has an option 'cpu_s' that must be at least 1, and is 0")
