"""Invalid names of reward functions: a real rewarder, a key with the scope score, and a mark that must not appear."""

import itertools
import marshal
import os
import zipfile
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import httpx
import pytest

from tests.conftest import RedisServer
from tests.http.attacked import CANARY, LEAVES_A_MARK, MARK, Judge, scoped_key, write_keys
from tests.http.service_process import ROOT, ServiceProcess

_AT_ONCE = 32
TOOLS = """
import builtins, contextlib, ctypes, code, functools, io, os, pathlib, shutil, subprocess, types, weakref
from asyncio import create_subprocess_shell as shell_on_the_loop
from builtins import __import__ as load, eval as calculate, exec as run_code, open as open_file, print as say
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, reload
from os import execv, fork, popen, remove, system
from subprocess import call, check_output, getoutput, run
from os import *

plain = os.system
part = functools.partial(os.system)
part_of_part = functools.partial(functools.partial(subprocess.run, shell=True), check=True)
part_of_class = functools.partial(subprocess.Popen)
cached = functools.cache(os.system)
limited = functools.lru_cache(maxsize=1)(subprocess.getoutput)
single = functools.singledispatch(os.system)
static = staticmethod(os.system)
bound = types.MethodType(os.system, "true")
proxy = weakref.proxy(subprocess.run)
submit = ThreadPoolExecutor().submit
runsource = code.InteractiveInterpreter().runsource
write_text = pathlib.Path("x").write_text
libc_system = ctypes.CDLL(None).system
context = contextlib.contextmanager(subprocess.run)
wrapped = functools.wraps(len)(subprocess.run)
attribute = property(lambda self: os.system)
table = {"system": os.system}
listed = [os.system]
module = os
klass = subprocess.Popen
_private = os.system


class Judge:
    shell = staticmethod(os.system)

    @property
    def made(self):
        return os.system


class Loose(type):
    def __call__(cls, *a, **k):
        return os.system


class Strange(metaclass=Loose):
    pass


def own(completions, **_):
    return [1.0] * len(completions)
"""
_TOP = (
    "os", "posix", "subprocess", "builtins", "sys", "importlib", "runpy", "pickle", "marshal", "ctypes", "code", "pdb",
    "pty", "shutil", "socket", "multiprocessing", "webbrowser", "platform", "zipimport", "site", "types", "functools",
    "operator", "inspect", "gc", "asyncio", "timeit", "cProfile", "venv", "compileall", "tempfile", "pathlib", "io",
    "signal", "resource", "logging", "sqlite3", "xmlrpc", "http", "wsgiref", "smtplib", "ftplib", "antigravity",
    "idlelib", "ensurepip", "numpy", "yaml", "torch", "pip", "setuptools", "pytest", "httpx", "redis", "pydantic",
    "services", "shared", "headrace", "tests", "__main__", "__mp_main__", "outside", "installed",
)  # fmt: skip
_UNDER, _CALLED = ("", ".path", ".util", ".__main__"), ("system", "main")
_IN_TOOLS = (
    "system", "popen", "execv", "fork", "remove", "run", "call", "check_output", "getoutput", "load", "calculate",
    "run_code", "open_file", "say", "import_module", "reload", "shell_on_the_loop", "plain", "part", "part_of_part",
    "part_of_class", "cached", "limited", "single", "static", "bound", "proxy", "submit", "runsource", "write_text",
    "libc_system", "context", "wrapped", "attribute", "table", "listed", "module", "klass", "_private", "Judge",
    "Strange", "ThreadPoolExecutor", "os", "subprocess", "spawnv", "kill", "chmod", "rename", "__builtins__",
    "__loader__", "__spec__", "__dict__", "__class__", "__doc__", "__name__", "__file__", "__getattribute__",
    "__setattr__", "__reduce_ex__", "__init__", "__dir__", "mro",
)  # fmt: skip
_SPELLED = (
    "{}\n", "{}\r", "{}\0", "{} ", " {}", "\t{}", "{}()", "{};x", "{}#", "{}:x", ":{}", ".{}", "..{}", "{}.", "{}.x",
    "({})", "'{}'", "`{}`", "${{{}}}", "%s{}", "{}%00", "{}\u200b", "\u200b{}", "\ufeff{}", "\u202e{}", "{}\u0301",
    "{}@main", "file:///{}", "python:{}", "./{}", "../{}", "/{}", "~/{}", "{}/..", "{}\\", "lambda:{}", "import {}",
    "{}\x1b[0m",
)  # fmt: skip
_ELSEWHERE = (
    "linked:score", "linked_folder.outside:score", "linked_folder:score", "package.deeper.outside:score",
    "stray:score", "__pycache__.stray:score", "pack.zip.zipped:score", "pack:score", "zipped:score",
    "tools.zipped:score", "evil:score", "namespace.part:score", "colorsys:score", "json:score", "services.evil:score",
    "os.path.evil:score", "tools.os:system", "tools.subprocess:run", "tools.own:own", "tools.Judge:shell",
    "tools:Judge.shell", "tools:own.__globals__", "tools:own.__call__", "tools:table.system", "tools:module.system",
    "tools:own.__code__", "__init__:score", "package.__init__.x:score", "tools.__init__:own", "tools.tools:own",
    "libtool:score", "egg:score", "tools/own:own", "\uff4f\uff53:system", "o\u0455:system", "tools:\uff53ystem",
    "tools:sy\u017ftem", "to\u043els:own", "\u1d52s:system", "os\u00ad:system", "{top}/beside/outside.py:score",
    "{top}/beside/outside:score", "{top}/beside", "/proc/self/environ", "/proc/self/root{top}/beside",
    "{top}/rewards/../beside", "{top}/rewards/linked_folder", "file://{top}/beside", "beside/outside",
    "../beside/outside", "..", ".", "/", "//", "", ":", "::", "a:", ":b", "a" * 1024 + ":b", "x." * 300 + "y:z",
    "org/name@../../..", "org/../../etc", "org/name@refs/../x", "https://x/y", "hf://org/name", "org\\name",
)  # fmt: skip


def names(top: Path) -> Iterator[str]:
    for module, under, function in itertools.product(_TOP, _UNDER, _CALLED):
        yield f"{module}{under}:{function}"
    yield from (f"tools:{name}" for name in _IN_TOOLS)
    for spelling, name in itertools.product(_SPELLED, ("tools:own", "os:system", "tools:system")):
        yield spelling.format(name)
    yield from (name.replace("{top}", str(top)) for name in _ELSEWHERE)


def lay_out(top: Path) -> None:
    """Make a reward path with links that lead out of it, next to modules that must not be imported."""
    for name in ("rewards/package", "rewards/namespace", "rewards/__pycache__", "beside", "site", "rewards/services"):
        (top / name).mkdir(parents=True)
    rewards, beside = top / "rewards", top / "beside"
    (rewards / "tools.py").write_text(TOOLS)
    for path in (
        beside / "outside.py", beside / "__init__.py", beside / "part.py", top / "site" / "installed.py",
        rewards / "colorsys.py", rewards / "json.py", rewards / "services" / "evil.py", rewards / "libtool.txt",
    ):  # fmt: skip
        path.write_text(LEAVES_A_MARK)
    (rewards / "evil.pth").write_text(f"import pathlib; pathlib.Path({str(top / MARK)!r}).touch()\n")
    (rewards / "egg.egg-link").write_text(str(beside))
    with zipfile.ZipFile(rewards / "pack.zip", "w") as pack:
        pack.writestr("zipped.py", LEAVES_A_MARK)
    code = compile(LEAVES_A_MARK, str(rewards / "stray.py"), "exec")
    (rewards / "__pycache__" / "stray.cpython-311.pyc").write_bytes(MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code))
    (rewards / "linked.py").symlink_to(beside / "outside.py")
    (rewards / "linked_folder").symlink_to(beside)
    (rewards / "package" / "__init__.py").write_text("")
    (rewards / "package" / "deeper").symlink_to(beside)
    (rewards / "namespace" / "part.py").symlink_to(beside / "part.py")
    (beside / "secret").write_text(CANARY)


@pytest.fixture(scope="module")
def attacked(
    http_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, ServiceProcess]]:
    top = tmp_path_factory.mktemp("names")
    lay_out(top)
    process = ServiceProcess(
        "rewarder",
        http_redis.url,
        top,
        HEADRACE_API_KEYS_FILE=str(write_keys(top / "api-keys")),
        HEADRACE_REWARD_PATH=str(top / "rewards"),
        HEADRACE_DATA_ROOTS=str(top / "rewards"),
        HEADRACE_NUM_REWARD_WORKERS="2",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(top / "site")]),
    )
    yield top, process
    assert process.end() == 0, process.log()


def test_no_name_leads_to_what_is_not_a_reward_function(attacked: tuple[Path, ServiceProcess]) -> None:
    top, service = attacked
    judge = Judge(top, service)
    mark = top / MARK
    headers = {"Authorization": f"Bearer {scoped_key('score')}"}
    base = f"http://127.0.0.1:{service.port}"
    all_names = list(dict.fromkeys(names(top)))
    with httpx.Client(base_url=base, headers=headers, trust_env=False, timeout=300) as client:
        own = client.post("/v1/rewards/check", json={"reward_funcs": ["tools:own"]})
        assert own.status_code == 200, own.text
        for some in _batches(all_names):
            reply = client.post("/v1/rewards/check", json={"reward_funcs": some})
            problem = judge.look_at(str(some[:3]), reply)
            refused = {error["field"] for error in problem.get("errors", [])}
            judge.num_attempts += len(some) - 1
            # The body as a whole is refused before any name is checked.
            if any(field.startswith("reward_funcs") for field in refused):
                for name in some:
                    judge.look_at(repr(name), client.post("/v1/rewards/check", json={"reward_funcs": [name]}))
            elif len(refused) != len(some):
                judge.wrong.append(f"taken for reward functions: {[name for name in some if name not in refused]}")
        suspects = [f"tools:{name}" for name in _IN_TOOLS] + ["os:system", "linked:score", "installed:score"]
        for name in suspects:
            arguments = {"command": f"touch {mark}"}
            reply = client.post(
                "/v1/score",
                json={
                    "reward_funcs": [name],
                    "reward_kwargs": {name: arguments},
                    "prompts": [f"touch {mark}"],
                    "completions": [f"touch {mark}"],
                },
            )
            judge.num_attempts += 1
            if reply.status_code == 200 and reply.json()["outcomes"][0][0]["outcome"] != "error":
                judge.wrong.append(f"scored with {name}: {reply.text[:300]}")
    judge.conclude(at_least=600)


def _batches(found: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(found), _AT_ONCE):
        yield found[at : at + _AT_ONCE]
