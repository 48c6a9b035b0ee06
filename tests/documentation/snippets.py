"""Checks Python, YAML and JSON on a page: what needs no service is run, and names of ours are looked up in the rest."""

import ast
import importlib
import inspect
import json
from typing import Any, cast

import pytest
import yaml

from headrace import GRPOConfig, GRPOTrainer
from headrace.client import HeadraceClient
from shared.run_options.run_config import RunConfig, parse_run_config
from tests.documentation.http_requests import check_answer, route_of
from tests.documentation.page_blocks import BLOCKS, Block
from tests.documentation.programs import CHART, DEPLOY, check_values_key
from tests.documentation.shell_commands import commands_in

_CALLABLES = {"GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_OURS = ("headrace", "services", "shared")
_REST_OF_A_RUN: dict[str, Any] = {"model": "m", "dataset_name": "train.jsonl", "reward_funcs": ["accuracy_reward"]}


def check_python(block: Block) -> bool:
    """Compile a block and check its names. Return whether it was executed: if it only imports and defines."""
    tree = ast.parse(block.text)
    is_ours = not any(theirs in block.text for theirs in ("from trl", "httpx", "OpenAI", "Anthropic"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in _OURS:
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Call) and is_ours:
            _check_call(node)
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    if not all(_is_definition(node) for node in tree.body):
        return False
    for name in imported:
        pytest.importorskip(name.partition(".")[0])
    exec(compile(tree, str(block), "exec"), {"__name__": "a page"})
    return True


def _is_definition(node: ast.stmt) -> bool:
    return isinstance(node, _IMPORTS) or (isinstance(node, _DEFINITIONS) and not node.decorator_list)


def _check_call(call: ast.Call) -> None:
    """Check keyword arguments of our classes, and methods of the client."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in _CALLABLES:
        known = inspect.signature(_CALLABLES[function.id]).parameters
        named = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert named <= known.keys(), f"{function.id} does not take {named - known.keys()}"
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        kind = {"trainer": GRPOTrainer, "client": HeadraceClient, "trainer.client": HeadraceClient}.get(owner)
        assert kind is None or hasattr(kind, function.attr), f"{owner} has no {function.attr}"


def check_yaml(block: Block) -> bool:
    """Check a run file, or a part of one, or of a compose file, or of values of the chart."""
    parts = [part for part in yaml.safe_load_all(block.text) if part is not None]
    assert parts
    if any("apiVersion" in part for part in parts):
        return False
    (part,) = parts
    if part.keys() <= RunConfig.model_fields.keys():
        rest = {
            name: value for name, value in _REST_OF_A_RUN.items() if not (name == "dataset_name" and "datasets" in part)
        }
        parse_run_config(rest | part)
        return True
    if "services" in part:
        services = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
        assert part["services"].keys() <= services.keys()
        return True
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    if not part.keys() <= values.keys():
        return False
    for path in _paths(part):
        check_values_key(path, values)
    return True


def _paths(values: Any, above: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [above]
    known = cast("dict[str, Any]", values)
    return [path for key, value in known.items() for path in _paths(value, f"{above}.{key}" if above else key)]


def check_json(block: Block) -> bool:
    """Parse a block; if the block before it is a request, check that the route answers so."""
    try:
        found = [json.loads(block.text)]
    except json.JSONDecodeError:
        found = [json.loads(line) for line in _objects(block.text)]
    before = BLOCKS[BLOCKS.index(block) - 1]
    if before.page != block.page or "auth " not in before.shell:
        return False
    requests = [command.words for command in commands_in(before.shell) if command.words[:1] == ("auth",)]
    return all(check_answer(route_of(requests[-1][1:]), body) for body in found)


def _objects(text: str) -> list[str]:
    """Return the objects of a text, each of which begins in the first column."""
    return ["{" + piece for piece in ("\n" + text).split("\n{")[1:]]
