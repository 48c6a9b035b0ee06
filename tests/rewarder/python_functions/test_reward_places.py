"""A reward function's name cannot run other installed code. A real rewarder, with an attacker's requests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.rewarder.python_functions.reward_tasks import RewardTasks
from services.rewarder.reward_answer import Inspected
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.user_code.places import Places
from shared.user_code.worker_frames import Refused
from tests.conftest import RedisServer
from tests.rewarder.conftest import ROOT, RewarderProcess, pool_and_scorer, shared_rewarder
from tests.shared_process import SharedProcess

LEAVES_A_MARK = """
from pathlib import Path

Path(__file__).with_name("imported").touch()


def score(completions, **_):
    return [1.0] * len(completions)
"""
TOOLS = """
import functools
import json
import os
import os.path
import random
import subprocess
from os import *
from os import system, popen as launch
from random import shuffle
from subprocess import check_output

run = os.system
quick = functools.partial(os.system)
kept = functools.lru_cache(os.system)
wrapped = functools.wraps(os.system)(functools.partial(os.system))
find = "text".find
write = Path.write_text if "Path" in globals() else json.JSONEncoder.encode
encode = json.JSONEncoder().encode
Popen = subprocess.Popen


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)

    def score(self, completions, **_):
        return [1.0] * len(completions)

    @staticmethod
    def shell(command, **_):
        return os.system(command)


def own(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a reward path, forbidden files next to it, and installed packages."""
    top = tmp_path_factory.mktemp("places")
    for name in (
        "rewards",
        "rewards/folder",
        "rewards/package",
        "beside",
        "beside/inner",
        "installed",
        "installed/lib",
    ):
        (top / name).mkdir()
    for name in ("beside/outside.py", "beside/inner/outside.py", "installed/canary.py", "installed/lib/__init__.py"):
        (top / name).write_text(LEAVES_A_MARK)
    rewards = top / "rewards"
    (rewards / "tools.py").write_text(TOOLS)
    for name in ("colorsys.py", "json.py", "canary.py", "folder/inside.py", "package/__init__.py"):
        (rewards / name).write_text(LEAVES_A_MARK)
    (rewards / "linked.py").symlink_to(top / "beside" / "outside.py")
    (rewards / "linked_folder").symlink_to(top / "beside")
    (rewards / "package" / "deeper").symlink_to(top / "beside" / "inner")
    return top


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer, places: Path) -> Iterator[SharedProcess[RewarderProcess]]:
    settings = {
        "HEADRACE_REWARD_PATH": str(places / "rewards"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(places / "installed")]),
    }
    with shared_rewarder(redis_server.url, places / "rewarder.log", **settings) as shared:
        yield shared


def marks(places: Path) -> list[str]:
    return sorted(str(path.relative_to(places)) for path in places.rglob("imported"))


def shell_of(mark: Path) -> dict[str, Any]:
    """Return keyword arguments that would make most functions which run a command leave a mark."""
    command = f"touch {mark}"
    return {"command": command, "cmd": command, "args": ["touch", str(mark)]}


def attack(client: httpx.Client, name: str, kwargs: dict[str, Any]) -> list[str]:
    """Score with the function, once without keyword arguments and once with each; return all responses."""
    said: list[str] = []
    for given in ({}, *({key: value} for key, value in kwargs.items())):
        reply = client.post(
            "/v1/score",
            json={
                "reward_funcs": [name],
                "reward_kwargs": {name: given} if given else {},
                "prompts": ["touch imported"],
                "completions": ["touch imported"],
            },
        )
        if reply.status_code == 422:
            said.append(reply.json()["detail"])
            continue
        outcome = reply.json()["outcomes"][0][0]
        assert outcome["outcome"] == "error", outcome
        said.append(outcome["detail"])
    checked = client.post("/v1/rewards/check", json={"reward_funcs": [name]})
    assert checked.status_code == 422
    return [*said, checked.json()["detail"]]


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "posix:system", "subprocess:run", "subprocess:check_output", "builtins:eval", "builtins:exec",
        "runpy:run_path", "shutil:rmtree", "pathlib:Path", "importlib:import_module", "code:interact", "os.path:exists",
        "site:main", "antigravity:geohash", "this:d", "colorsys:score", "json:score", "pickle:loads",
        "services.rewarder.sandbox.bounded_process:run_bounded", "services.rewarder.__main__:main",
        "shared.service.logs:log", "headrace.cli.command_line:main", "__main__:main", "__mp_main__:main",
        "canary:score", "lib:score", "lib.sub:score",
        "numpy:load", "pydantic:create_model", "pip:main", "setuptools:setup", "rewards.tools:own", "package.deeper:x",
        "linked:score", "linked_folder.outside:score", "linked_folder:score", "package.deeper.outside:score",
    ],
)  # fmt: skip
def test_a_module_outside_the_reward_path_is_neither_imported_nor_called(
    client: httpx.Client, places: Path, name: str
) -> None:
    mark = places / "ran"
    said = attack(client, name, shell_of(mark))
    for text in said:
        assert any(words in text for words in ("cannot come from", "no module named", "hidden by")), text
    assert not mark.exists()
    assert marks(places) == [], "it was imported"


@pytest.mark.parametrize(
    "name",
    ["system", "launch", "shuffle", "check_output", "run", "quick", "kept", "wrapped", "find", "write", "encode"],
)
def test_a_function_that_a_reward_module_only_imports_is_not_called(
    client: httpx.Client, places: Path, name: str
) -> None:
    mark = places / "ran"
    for text in attack(client, f"tools:{name}", shell_of(mark)):
        assert "tools only imports" in text, text
        assert "__all__ of tools" in text
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tools:Popen", "is not a function"),
        ("tools:Judge", "is not a function"),
        ("tools:os", "is not a function"),
        ("tools:__builtins__", "has no function"),
        ("tools:__setattr__", "has no function"),
        ("tools:__class__", "has no function"),
        ("tools:os.system", "is not of the form 'package.module:function'"),
        ("tools:Judge.shell", "is not of the form 'package.module:function'"),
        ("tools:own\n", "is not of the form 'package.module:function'"),
        ("..tools:own", "is not of the form 'package.module:function'"),
        ("../beside/outside:score", "no reward model"),
        ("tools.py:own", "no module named tools.py"),
        ("tools:own:system", "is not of the form 'package.module:function'"),
    ],
)
def test_a_name_leads_to_a_function_of_a_module_and_no_further(
    client: httpx.Client, places: Path, name: str, says: str
) -> None:
    mark = places / "ran"
    said = attack(client, name, shell_of(mark))
    if "/" not in name:
        assert all(says in text for text in said), said
    assert not mark.exists()


def test_a_module_in_a_folder_without_init_is_found_in_the_reward_path(client: httpx.Client, places: Path) -> None:
    names = ["tools:own", "folder.inside:score", "package:score"]
    reply = client.post("/v1/rewards/check", json={"reward_funcs": names})
    assert reply.status_code == 200, reply.text
    assert marks(places) == ["rewards/folder/imported", "rewards/package/imported"]
    for mark in marks(places):
        (places / mark).unlink()


MADE = """
import contextlib
import functools
import operator

import our_formats
from our_formats import brevity, with_factor


def undecorated(function):
    def inner(completions, **columns):
        return function(completions, **columns)
    return inner


class Judge:
    def __call__(self, completions, **_):
        return [1.0] * len(completions)

    def score(self, completions, **_):
        return [1.0] * len(completions)

    @classmethod
    def of_class(cls, completions, **_):
        return [1.0] * len(completions)


@functools.lru_cache
def cached(completions):
    return [1.0]


@contextlib.contextmanager
def library_decorated(completions, **_):
    yield


@undecorated
def decorated(completions, **_):
    return [1.0] * len(completions)


async def on_loop(completions, **_):
    return [1.0] * len(completions)


partial = functools.partial(decorated)
factory = with_factor(2.0)
named_lambda = lambda completions, **_: [1.0] * len(completions)
instance = Judge()
method = Judge().score
class_method = Judge.of_class
alias = our_formats.brevity
from_library = operator.itemgetter("completions")
"""
FORMATS = """
import math
from os import system

__all__ = ["brevity", "system", "with_factor"]


def brevity(completions, **_):
    return [1.0] * len(completions)


def with_factor(factor):
    def scaled(completions, **_):
        return [factor] * len(completions)
    return scaled
"""
INSTALLED = """
from os import system
from their_package.parts import piece


def score(completions, **_):
    return [1.0] * len(completions)
"""


async def inspected(directory: Path, *names: str, packages: tuple[str, ...] = ()) -> dict[str, Inspected | Refused]:
    tasks = RewardTasks(Places((str(directory),), packages))
    async with pool_and_scorer(RewarderMetrics(), tasks) as (_, scorer):
        return await scorer.check(names)


async def test_any_callable_made_in_a_reward_module_may_be_called(tmp_path: Path) -> None:
    (tmp_path / "our_rewards.py").write_text(MADE)
    (tmp_path / "our_formats.py").write_text(FORMATS)
    made = ["cached", "library_decorated", "decorated", "on_loop", "partial", "factory", "named_lambda", "instance"]
    made += ["method", "class_method", "alias", "brevity", "with_factor", "from_library"]
    found = await inspected(tmp_path, *(f"our_rewards:{name}" for name in made), "our_formats:system")
    assert {name: what.detail for name, what in found.items() if isinstance(what, Refused)} == {}, (
        "__all__ names system"
    )


async def test_of_an_installed_package_only_what_the_operator_named_may_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    for name in ("their_package", "their_package/parts", "their_package_too"):
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("")
    (installed / "their_package" / "parts" / "__init__.py").write_text("def piece(completions, **_): ...")
    (installed / "their_package" / "rewards.py").write_text(INSTALLED)
    (installed / "their_package_too" / "__init__.py").write_text(LEAVES_A_MARK)
    monkeypatch.syspath_prepend(installed)
    allowed = ["their_package.rewards:score", "their_package.rewards:piece", "their_package.parts:piece"]
    others = ["their_package.rewards:system", "their_package_too:score"]
    found = await inspected(tmp_path, *allowed, *others, packages=("their_package",))
    assert [name for name, what in found.items() if isinstance(what, Refused)] == others
    found = await inspected(tmp_path, *allowed, *others, packages=("their_package.rewards",))
    assert [name for name, what in found.items() if isinstance(what, Refused)] == [*allowed[1:], *others]
    found = await inspected(tmp_path, *allowed, *others)
    assert all(isinstance(what, Refused) and "HEADRACE_REWARD_MODULES" in what.detail for what in found.values())
    assert not list(installed.rglob("imported"))


async def test_a_link_within_the_reward_path_is_followed(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()  # as Kubernetes mounts a ConfigMap
    (tmp_path / "..data" / "mounted.py").write_text("def score(completions, **_): ...")
    (tmp_path / "mounted.py").symlink_to(Path("..data") / "mounted.py")
    (found,) = (await inspected(tmp_path, "mounted:score")).values()
    assert isinstance(found, Inspected), found


async def test_a_module_that_a_link_took_out_of_the_path_later_is_refused(tmp_path: Path) -> None:
    rewards = tmp_path / "rewards"
    rewards.mkdir()
    (tmp_path / "secret.py").write_text(LEAVES_A_MARK)
    (rewards / "moved.py").write_text("def score(completions, **_): ...")
    (rewards / "other.py").write_text("def score(completions, **_): ...")
    tasks = RewardTasks(Places((str(rewards),)))
    async with pool_and_scorer(RewarderMetrics(), tasks) as (_, scorer):
        assert isinstance((await scorer.check(["moved:score"]))["moved:score"], Inspected)
        (rewards / "moved.py").unlink()
        (rewards / "moved.py").symlink_to(tmp_path / "secret.py")
        found = (await scorer.check(["moved:score"]))["moved:score"]
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "imported").unlink()
        pytest.fail("it was imported")
    assert isinstance(found, Refused)
    assert "moved is a link that leads out" in found.detail
