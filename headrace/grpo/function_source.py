"""Writes the functions and classes of a script or a notebook as the text of a module of their own.

    a function, and the names that it uses:    installed modules   --> import statements
                                               own functions       --> their source
                                               plain values        --> literals

Code travels as source and never as a pickle, so it can be read where it runs, and Python versions may differ.
Variables of enclosing functions become variables of the module. Their values are taken when the module is written.
"""

import ast
import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import ModuleType
from typing import Any, cast

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.definitions import (
    Scope,
    assigned_in,
    definition_of,
    function_of,
    is_of_its_class,
    methods_given_later,
    names_in_quotes,
    names_used,
    plain_name,
    text_of,
)
from headrace.installed_modules import is_installed

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, dict)
_BRACKETS: Mapping[type, str] = {list: "[{}]", tuple: "({},)", set: "{{{}}}"}
_DESCRIPTORS: Mapping[type, str] = {kind: kind.__name__ for kind in (staticmethod, classmethod, property)}
_MAX_LITERAL = 1_000_000
_MADE_BY_A_CALL: tuple[tuple[type, str, Callable[[Any], str]], ...] = (
    (re.Pattern, "re", lambda pattern: f"re.compile({pattern.pattern!r}, {pattern.flags})"),
    (PurePath, "pathlib", lambda path: f"pathlib.{type(path).__name__}({str(path)!r})"),
    (logging.Logger, "logging", lambda logger: f"logging.getLogger({logger.name!r})"),
)
"""Types of values that are not literals, with the module that makes them, and the expression."""


def module_text(functions: Mapping[str, Any]) -> str:
    """Return the text of a module that defines each function or class under its name in ``functions``.

    Raises:
        ArgumentError: A function, or a value that it uses, cannot be written as text. The message names it.
    """
    module = _Module()
    for name, function in functions.items():
        module.define(name, function, used_by="")
    future = ["from __future__ import annotations"] if module.has_future_annotations else []
    exported = f"__all__ = {sorted(functions)!r}"
    return "\n\n\n".join(["\n".join([*future, *module.imports]), *module.definitions, exported]).lstrip() + "\n"


class _Module:
    """The imports and definitions of a module that is being written."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self.has_future_annotations = False
        self._values: dict[str, Any] = {}

    def define(self, name: str, value: Any, *, used_by: str) -> None:
        """Add the definition of ``name`` to the module, after the definitions of all names that it uses.

        Args:
            name: The name in the module.
            value: The function, class, module or other value.
            used_by: The function that uses the name, for messages; empty for an exported function.

        Raises:
            ArgumentError: The value cannot be written as text, or ``name`` already has another value.
        """
        if name in self._values:
            if not _is_same(self._values[name], value):
                raise ArgumentError(
                    f"{used_by or name}: two different things are called {name} in the code that it uses; rename one"
                )
            return
        self._values[name] = value
        if (statement := _import_of(name, value)) is not None:
            self.imports.append(statement)
        elif isinstance(value, functools.partial):
            self._define_partial(name, cast("Any", value), used_by=used_by)
        elif hasattr(value, "registry") and hasattr(value, "dispatch"):
            raise ArgumentError(f"{name} is a functools.singledispatch function, whose branches are not in its source")
        elif isinstance(value, type) or function_of(value) is not None:
            self._define_code(name, value, used_by=used_by)
        elif _is_plain_object(value):
            self._define_object(name, value, used_by=used_by)
        else:
            for kind, module, expression in _MADE_BY_A_CALL:
                if isinstance(value, kind):
                    self.define(module, sys.modules[module], used_by=name)
                    self.definitions.append(f"{name} = {expression(value)}")
                    return
            self.definitions.append(f"{name} = {_literal(value, name=name, used_by=used_by)}")

    def _import_submodules(self, name: str, module: ModuleType, node: ast.AST) -> None:
        """Add imports of the submodules that code uses as attributes of a module, such as ``xml.etree.ElementTree``.

        These come before all other imports, so that they cannot overwrite a name that another import defines.
        """
        for inner in ast.walk(node):  # the longest of nested attributes first
            path = ast.unparse(inner) if isinstance(inner, ast.Attribute) else ""
            statement = f"import {module.__name__}{path.removeprefix(name)}"
            is_submodule = path.startswith(f"{name}.") and statement.removeprefix("import ") in sys.modules
            if is_submodule and not any(f"{known}.".startswith(f"{statement}.") for known in self.imports):
                self.imports.insert(0, statement)

    def _define_partial(self, name: str, value: "functools.partial[Any]", *, used_by: str) -> None:
        self.define("functools", functools, used_by=name)
        inner = plain_name(value.func, otherwise=f"{name}_function")
        inner = f"{inner}_" if inner == name else inner
        self.define(inner, value.func, used_by=used_by or name)
        arguments = [_literal(argument, name=f"an argument of {name}", used_by=used_by) for argument in value.args]
        arguments += [f"{key}={_literal(it, name=key, used_by=name)}" for key, it in value.keywords.items()]
        self.definitions.append(f"{name} = functools.partial({', '.join([inner, *arguments])})")

    def _define_object(self, name: str, value: Any, *, used_by: str) -> None:
        """Write a callable object of an installed class as an empty object to which its attributes are added."""
        kind = type(value).__name__
        self.define(kind, type(value), used_by=name)
        attributes = _literal(vars(value), name=name, used_by=used_by)
        self.definitions.append(f"{name} = object.__new__({kind})\nvars({name}).update({attributes})")

    def _define_code(self, name: str, value: Any, *, used_by: str) -> None:
        node, lines = definition_of(value, name=name, used_by=used_by)
        scope, function = Scope(value), function_of(value)
        if function is not None and is_of_its_class(function.__code__):
            raise ArgumentError(
                f"{used_by or name}: the method {function.__code__.co_qualname} cannot be sent without its class, "
                "because it uses super() or a private name such as self.__x; write the change of it in the class"
            )
        is_changed = function is not None and _set_defaults(node, function, scope, name=name)
        if function is value and not isinstance(node, ast.Lambda) and node.decorator_list:
            kept = [
                it for it in node.decorator_list if ast.unparse(it).partition("(")[0] in ("wraps", "functools.wraps")
            ]
            is_changed, node.decorator_list = True, kept
        if isinstance(node, ast.Lambda):
            text, own_name = f"{name} = {ast.unparse(node)}", name
        else:
            text, own_name = ast.unparse(node) if is_changed else text_of(node, lines), node.name
        owner = self._values.setdefault(own_name, value)
        if own_name != name and owner is not value and getattr(owner, "func", None) is not value:  # its own partial
            raise ArgumentError(f"{used_by or name}: two different things are called {own_name}; rename one")
        has_one_of_this_name = function is not None and name in function.__code__.co_freevars
        if own_name != name and has_one_of_this_name and scope.find(name)[1] is not value:
            raise ArgumentError(f"{used_by or name}: two different things are called {name}; rename one")
        if scope.has_future_annotations:
            self.has_future_annotations = True
        for used in sorted((names_used(text, name=name) | names_in_quotes(node)) - {name, own_name}):
            found, its_value = scope.find(used)
            if found:
                self.define(used, its_value, used_by=name)
                if isinstance(its_value, ModuleType):
                    self._import_submodules(used, its_value, node)
        self.definitions.append(text)
        if name != own_name:
            self.definitions.append(f"{name} = {own_name}")
        if isinstance(value, type):
            self.definitions += _changed_attributes(name, value, node)
            self._define_methods_given_later(name, value, node)

    def _define_methods_given_later(self, name: str, kind: type, node: Any) -> None:
        for key, member in methods_given_later(kind, node):
            if isinstance(member, property) and (member.fset or member.fdel):
                raise ArgumentError(
                    f"{name}.{key} is a property with a setter or deleter that {name} was given after its definition, "
                    "and cannot be sent to the services as text; write it in the class"
                )
            around = _DESCRIPTORS.get(type(cast("object", member)), "")
            value: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            its_name = plain_name(value, otherwise=f"{name}_{key}")
            self.define(its_name, value, used_by=name)
            self.definitions.append(f"{name}.{key} = {around}({its_name})" if around else f"{name}.{key} = {its_name}")


def _set_defaults(node: Any, function: Any, scope: Scope, *, name: str) -> bool:
    """In a function's tree, replace defaults computed from variables by values, and return whether there was one."""
    given = node.args
    by_name: dict[str, Any] = function.__kwdefaults__ or {}
    pairs: list[tuple[list[Any], int, Any]]
    pairs = [(given.defaults, number, value) for number, value in enumerate(function.__defaults__ or ())]
    pairs += [(given.kw_defaults, n, by_name[it.arg]) for n, it in enumerate(given.kwonlyargs) if it.arg in by_name]
    is_changed = False
    for expressions, number, value in pairs:
        expression = expressions[number]
        used = [inner.id for inner in ast.walk(expression) if isinstance(inner, ast.Name)]
        if not used or (isinstance(expression, ast.Name) and scope.find(expression.id)[1] is value):
            continue
        if isinstance(value, (*_SCALARS, *_CONTAINERS)) or isinstance(expression, ast.Name):
            expressions[number] = ast.parse(_literal(value, name="a default", used_by=name), mode="eval").body
            is_changed = True
    return is_changed


def _changed_attributes(name: str, kind: type, node: Any) -> list[str]:
    """Return statements that assign the plain class attributes that changed after the class's definition."""
    written = assigned_in(node)
    return [
        f"{name}.{key} = {_literal(value, name=key, used_by=name)}"
        for key, value in vars(kind).items()
        if not key.startswith("__") and _is_changed(value, written.get(key))
    ]


def _is_changed(value: Any, written: ast.expr | None) -> bool:
    """Return whether a class attribute is a plain value that differs from the class's source text.

    A container counts as unchanged if the text computes it with an expression, or does not assign it.
    """
    if type(value) in _SCALARS:
        return written is None or ast.unparse(written) != repr(value)
    if type(value) not in _CONTAINERS or written is None:  # Python itself gives classes such as enums containers
        return False
    try:
        _expression(value)
        return not _is_same(ast.literal_eval(written), value)
    except (ValueError, RecursionError, _NotPlainError):  # it is computed, or holds what is not plain
        return False


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is a callable object of an installed class, with only plain values as attributes."""
    if not callable(value) or not hasattr(value, "__dict__") or _import_of(type(value).__name__, type(value)) is None:
        return False
    try:
        _expression(vars(value))
    except (_NotPlainError, RecursionError):
        return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, (*_SCALARS, *_CONTAINERS)) and bool(one == other)


def _import_of(name: str, value: Any) -> str | None:
    """Return the import statement that gives ``name`` this value from an installed module; None without one.

    Raises:
        ArgumentError: The value is a module of the user's own.
    """
    if isinstance(value, ModuleType):
        module = value.__name__
        if not is_installed(module):
            raise ArgumentError(
                f"{module} is a module of your own, and only its functions can be sent: import them by name "
                f"(from {module} import ...)"
            )
        if module == name:
            return f"import {module}"
        package, _, last = module.rpartition(".")
        return f"from {package} import {last} as {name}" if package else f"import {module} as {name}"
    home = _home_of(value)
    if home is None or not is_installed(home):
        return None
    for attribute in (name, getattr(value, "__qualname__", name)):
        if getattr(sys.modules[home], attribute, None) is value:
            return f"from {home} import {attribute}" + (f" as {name}" if attribute != name else "")
    return None


def _home_of(value: Any) -> str | None:
    if isinstance(value, (*_SCALARS, *_CONTAINERS)):
        return None
    home = getattr(value, "__module__", None) or type(value).__module__
    return home if isinstance(home, str) and home in sys.modules else None


def _literal(value: Any, *, name: str, used_by: str) -> str:
    """Return a Python expression that evaluates to the value.

    Raises:
        ArgumentError: The value has no such expression, or one longer than 1,000,000 characters.
    """
    try:
        text = _expression(value)
        if len(text) <= _MAX_LITERAL:
            return text
        found = f"longer than {_MAX_LITERAL:,} characters"
    except _NotPlainError as error:
        found = _described(value) + ("" if error.value is value else f" with {_described(error.value)} in it")
    except RecursionError:
        found = f"{_described(value)} that is nested too deeply"
    what = f"{used_by} uses {name}, which" if used_by else name
    instead = "create it inside the function, or give plain values"
    if not used_by and callable(value):  # the argument itself
        instead = "write it as a function, or as a functools.partial of one"
    raise ArgumentError(f"{what} is {found} and cannot be sent to the services as text; {instead}")


class _NotPlainError(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _expression(value: Any) -> str:
    """Return a Python expression for a value of builtin types. Raises _NotPlainError for others, such as subclasses."""
    kind = cast("type[object]", type(value))
    if kind is dict:
        return f"{{{', '.join(f'{_expression(key)}: {_expression(it)}' for key, it in value.items())}}}"
    if kind in _BRACKETS and value:
        entries = [_expression(it) for it in value]
        return _BRACKETS[kind].format(", ".join(sorted(entries) if kind is set else entries))
    if kind is complex:
        return f"complex({_expression(value.real)}, {_expression(value.imag)})"
    if kind is float and not math.isfinite(value):
        return f"float('{value}')"
    if kind in _SCALARS or kind in _CONTAINERS:
        return repr(value)
    raise _NotPlainError(value)


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
