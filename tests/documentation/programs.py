"""Checks a command on a page against the program that it names: its parser, its targets, its services.

A check raises if the program would refuse the command, so an option that is renamed in the code breaks a page.
"""

import argparse
import functools
import itertools
import os
import re
import runpy
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import pytest
import yaml

from headrace.cli.command_line import make_parser
from services.generator.settings import GeneratorSettings
from services.rewarder.settings import RewarderSettings
from services.sessions.settings import SessionsSettings
from services.trainer.settings import TrainerSettings
from tests.documentation.http_requests import check_request
from tests.documentation.page_blocks import ROOT
from tests.documentation.shell_commands import ShellCommand

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "headrace"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PLAIN = frozenset(
    (
        *("[", "base64", "cat", "cd", "chmod", "cp", "echo", "export", "grep", "head", "manifest", "mkdir"),
        *("realpath", "rev", "rm", "sed", "source", "tail", "tar"),
    )
)
"""Programs of every system, and a function on a page. What they do to files is not checked."""
_NUMBERS = {"RATE": "1"}
_NOT_INSTALLED = frozenset({"torch", "vllm", "transformers", "trl", "datasets", "psutil"})
"""Packages that `make check` has not."""
_WITH_A_VALUE = {"-v", "--entrypoint", "--scale", "-f", "--target", "-t", "--file"}


class _ParsedError(Exception):
    """Ends a program as soon as it has parsed its command line."""


def is_known(command: ShellCommand) -> bool:
    """Say whether the command's program can be checked, or need not be."""
    return not command.words or command.words[0] in CHECKS or command.words[0] in PLAIN


def check_command(command: ShellCommand) -> bool:
    """Check a command; return whether there was anything to check.

    Raises:
        AssertionError: The command is wrong.
        SystemExit: Its parser refuses it.
    """
    for variable in command.variables:
        assert not variable.startswith("HEADRACE_") or variable in _variables(), f"nothing reads {variable}"
    if not command.words:
        return any(variable.startswith("HEADRACE_") for variable in command.variables)
    program, *words = command.words
    if program in PLAIN:
        return False
    CHECKS[program](words)
    return True


def check_headrace(words: Sequence[str]) -> None:
    """Parse the arguments of ``headrace``."""
    make_parser().parse_args([_NUMBERS.get(word, word) for word in words])


def check_make(words: Sequence[str]) -> None:
    """Look up target and variables in the Makefile, and parse ARGS with the parser of the program that gets them."""
    target, *variables = words
    recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe, f"the Makefile has no target {target}"
    given = dict(word.split("=", 1) for word in variables)
    for name in given:
        assert re.search(rf"\$[({{]+(?:or \$\()?{name}\b", recipe[1]), f"make {target} does not use {name}"
    if found := re.search(r"python -m (benchmarks\.\w+|tests\.fuzz\.run) \$\(ARGS\)", recipe[1]):
        parse_with_module(found[1], shlex.split(given.get("ARGS", "")))
    elif ".venv/bin/headrace" in recipe[1]:
        check_headrace([target, *shlex.split(given.get("ARGS", ""))])


def check_python(words: Sequence[str]) -> None:
    """Compile the code after ``-c``, or parse the arguments of the module after ``-m``; pytest's are paths of tests."""
    kind, what, *rest = words
    if kind == "-c":
        compile(what, "-c", "exec")
    elif (kind, what) == ("-m", "pytest"):
        assert rest
        assert all((ROOT / path).exists() for path in rest)
    else:
        assert kind == "-m"
        parse_with_module(what, rest)


def parse_with_module(module: str, words: Sequence[str]) -> None:
    """Run a module as ``python -m`` does, until it has parsed these arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> NoReturn:
        parse(self, *given, **named)
        raise _ParsedError

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported before
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [module, *words])
        try:
            runpy.run_module(module, run_name="__main__")
        except _ParsedError:
            return
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _NOT_INSTALLED:
                raise
            pytest.skip(f"{module} needs {error.name}")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    raise AssertionError(f"{module} has parsed no arguments")


def check_docker(words: Sequence[str]) -> None:
    """Look up services in the compose file, and the file and target of an image."""
    if words[0] == "build":
        option = dict(itertools.pairwise(words))
        dockerfile = (ROOT / option["-f"]).read_text(encoding="utf-8")
        assert re.search(rf" AS {option['--target']}$", dockerfile, re.MULTILINE), option
        return
    services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    compose, action, *rest = words
    assert compose == "compose"
    option = dict(itertools.pairwise(rest))
    named = [option["--scale"].partition("=")[0]] if "--scale" in option else []
    plain = list(_without_options(rest))
    if action in ("exec", "run"):
        named += plain[:1]
    elif action == "cp":
        named += [word.partition(":")[0] for word in plain if ":" in word]
    else:
        assert action in ("up", "stop", "build", "pull"), f"docker compose {action}"
        named += plain
    assert set(named) <= services.keys(), named


def check_helm(words: Sequence[str]) -> None:
    """Look up chart, files and keys of values."""
    action, *rest = words
    assert action in ("install", "upgrade", "uninstall", "test", "get"), f"helm {action}"
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for option, value in itertools.pairwise(rest):
        if option == "-f" and "values-" in value:
            is_released = "values-images-" in value  # `make release` writes it
            assert is_released or (CHART / value).is_file() or (ROOT / value).is_file(), value
        if option == "--set":
            check_values_key(value.partition("=")[0], values)
    assert all((ROOT / word).is_dir() for word in rest if word.startswith("deploy/") and not word.endswith(".yaml"))


def check_values_key(path: str, values: Any) -> None:
    """Look up a key with dots in the chart's values."""
    for key in path.split("."):
        assert key in values, f"the chart has no value {path}"
        values = values[key]


def check_kubectl(words: Sequence[str]) -> None:
    """Look up the objects of the release that a command names."""
    from tests.helm.chart import of_kind, render

    objects = render()
    names = {it["metadata"]["name"] for it in objects}
    names |= {f"{it['metadata']['name']}-0" for it in objects if it["kind"] == "StatefulSet"}
    assert of_kind(objects, "StatefulSet")
    own = {re.split("/", word)[-1] for word in words if re.fullmatch(r"(\w+/)?headrace-[\w-]+", word)}
    assert own <= names, own - names


def check_pip(words: Sequence[str]) -> None:
    """Look up the extras."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"[\w-]+", words[-1].partition("[")[2].partition("]")[0]):
        assert re.search(rf"^{extra} = \[", text, re.MULTILINE), f"there is no extra {extra}"


def check_make_secrets(words: Sequence[str]) -> None:
    """The script is there."""
    assert not words
    assert (DEPLOY / "make-secrets").is_file()


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "./make-secrets": check_make_secrets,
    "auth": check_request,
    "curl": check_request,
    "docker": check_docker,
    "headrace": check_headrace,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
}


def _without_options(words: Sequence[str]) -> Iterator[str]:
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            yield word
        is_value = word in _WITH_A_VALUE


@functools.cache
def _variables() -> frozenset[str]:
    """Environment variables that settings, other code or the compose file read."""
    kinds = (TrainerSettings, GeneratorSettings, RewarderSettings, SessionsSettings)
    settings = {f"HEADRACE_{name.upper()}" for kind in kinds for name in kind.model_fields}
    sources = [path for place in ("services", "shared", "headrace") for path in (ROOT / place).rglob("*.py")]
    sources += [DEPLOY / "docker-compose.yml", ROOT / "tests" / "generator_contract" / "implementations.py"]
    read = {name for path in sources for name in re.findall(r"\bHEADRACE_\w+", path.read_text(encoding="utf-8"))}
    return frozenset(settings | read)
