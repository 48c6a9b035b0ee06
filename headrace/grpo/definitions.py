"""Finds the definition of a function or class in its file or notebook cell, and the variables that it uses there."""

import __future__

import ast
import functools
import inspect
import linecache
import re
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from headrace.grpo.argument_error import ArgumentError
from headrace.installed_modules import is_installed

_OF_EVERY_MODULE = frozenset(name for name in dir(__import__("builtins")) if name.startswith("__"))
_FUTURE_ANNOTATIONS = __future__.annotations.compiler_flag
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_lines_by_id: dict[int, tuple[CodeType, list[str]]] = {}
"""A code and the lines of its file, by the code's id, because equal codes may have different decorators."""


class Scope:
    """The variables that the code of a function or class sees outside itself."""

    def __init__(self, value: Any) -> None:
        functions = list(_functions_in(value))
        self.has_future_annotations = any(function.__code__.co_flags & _FUTURE_ANNOTATIONS for function in functions)
        self._tables: list[Mapping[str, Any]] = [_closure(function) for function in functions]
        self._tables += [function.__globals__ for function in functions]
        if isinstance(value, type):
            self._tables.append(vars(sys.modules.get(value.__module__, ModuleType("none"))))
            self._tables.append({base.__name__: base for base in value.__mro__[1:-1]})

    def find(self, name: str) -> tuple[bool, Any]:
        """Return True and the value of ``name`` in the surrounding code, or False and None. Builtins do not count."""
        for table in self._tables:
            if name in table:
                return True, table[name]
        return False, None


def _closure(function: FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    found.pop("__class__", None)  # of a method that calls super()
    return found


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that make up ``value``: a function itself, or the methods written in a class."""
    if not isinstance(value, type):
        function = function_of(value)
        if function is not None:
            yield function
        return
    for member in vars(value).values():
        function = _function_in(member)
        if function is not None and _is_inside(value, function) and _is_written(function.__code__):
            yield function


def _function_in(member: Any) -> FunctionType | None:
    return function_of(member.fget if isinstance(member, property) else getattr(member, "__func__", member))


def _is_inside(kind: type, function: FunctionType) -> bool:
    """Return whether a function's code is written in the class. A wrapper with a method's name is not."""
    return function.__code__.co_qualname.startswith(f"{kind.__qualname__}.")


def _is_generated_for(kind: type, function: FunctionType) -> bool:
    """Return whether a library such as attrs made a method: the function has a method's name, and wraps no other."""
    return function.__qualname__.startswith(f"{kind.__qualname__}.") and not hasattr(function, "__wrapped__")


def methods_given_later(kind: type, node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each method of the user's own that was assigned to a class after its definition."""
    methods = [it for it in node.body if isinstance(it, _FUNCTIONS) and it.decorator_list]
    in_text = {*assigned_in(node), *(method.name for method in methods)}
    scope = Scope(kind)
    has_own_decorators = any(_is_own(decorator, scope) for decorator in node.decorator_list)
    for name, member in vars(kind).items():
        parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
        functions = [function for part in parts if (function := _function_in(part)) is not None]
        if name in in_text or all(_is_inside(kind, it) or _is_generated_for(kind, it) for it in functions):
            continue
        is_made_by_decorator = has_own_decorators and "<locals>" in functions[0].__code__.co_qualname
        homes = [it.__globals__.get("__name__", "") for it in functions if _is_written(it.__code__)]
        if not is_made_by_decorator and not all(map(is_installed, homes)):
            yield name, member


def _is_own(decorator: ast.expr, scope: Scope) -> bool:
    """Return whether a decorator is the user's own code. ``dataclass`` is not, as it is from an installed module."""
    _, value = scope.find(ast.unparse(decorator).partition("(")[0].partition(".")[0])
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return not is_installed(str(home))


def is_of_its_class(code: CodeType) -> bool:
    """Return whether a method works only in its class, because it uses super() or a private name, such as self.__x."""
    kind = code.co_qualname.rpartition("<locals>.")[2].rpartition(".")[0].rpartition(".")[2].lstrip("_")
    codes = [code]
    for inner in codes:
        codes += [constant for constant in inner.co_consts if isinstance(constant, CodeType)]
    is_private = any(name.startswith(f"_{kind}__") for inner in codes for name in inner.co_names)
    return is_private or "__class__" in code.co_freevars


def assigned_in(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the expressions that a class's body assigns to variables, by the variable's name."""
    return {
        target.id: statement.value
        for statement in node.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    }


def _is_written(code: CodeType) -> bool:
    """Return whether a method has source outside the standard library, unlike methods that ``dataclass`` generates."""
    return not code.co_filename.startswith(sysconfig.get_path("stdlib")) and bool(_lines_of(code))


def _lines_of(code: CodeType) -> list[str]:
    """Return the lines of a code object's file or notebook cell, as they were at the first call.

    The file may be edited while its module stays loaded. A module that is loaded again has new code objects.
    """
    known = _lines_by_id.get(id(code))
    if known is None:
        known = _lines_by_id[id(code)] = code, _lines_now(code.co_filename)
    return known[1]


def _lines_now(file: str) -> list[str]:
    linecache.checkcache(file)
    return linecache.getlines(file)


def function_of(value: Any) -> FunctionType | None:
    """Return the function whose source defines a callable; None without one.

    For a function wrapped only by the decorators in its definition, this is the inner function, whose source
    includes the decorators. A wrapper that was made by a call, such as ``twice(reward)``, is a function of its own.
    """
    if not callable(value) or isinstance(value, (type, MethodType)):
        return None
    inner: Any = inspect.unwrap(value)
    if isinstance(inner, FunctionType) and (inner is value or _is_made_by_decorators(value, inner)):
        return inner
    if isinstance(value, FunctionType):
        return value
    return function_of(getattr(value, "__wrapped__", None)) if type(value).__module__ == "functools" else None


def _is_made_by_decorators(value: Any, inner: FunctionType) -> bool:
    """Return whether ``value`` is ``inner`` wrapped only by the decorators in the definition of ``inner``.

    A decorator may add several wrappers. So wrappers are counted only if ``value`` may have another origin: if the name
    of ``inner`` is not a variable of its module, or the text assigns it too, as in ``reward = scaled(reward)``.
    """
    inside, num_wrappers = value, 0
    while inside is not inner:
        inside, num_wrappers = inside.__wrapped__, num_wrappers + 1
    name, tree = inner.__qualname__, _parsed("".join(_lines_of(inner.__code__)))
    definitions = (it for it in ast.walk(tree) if isinstance(it, _FUNCTIONS) and _is_code_of(it, inner.__code__))
    num_decorators = next((len(node.decorator_list) for node in definitions), 0)
    if name not in inner.__globals__:
        return num_wrappers <= num_decorators
    trees = [tree, *map(_parsed, _cells().values())]
    is_bound_once = num_decorators > 0 and not any(_assigns(tree, name) for tree in trees)
    return inner.__globals__[name] is value and (num_wrappers <= num_decorators or is_bound_once)


def _assigns(tree: ast.AST, name: str) -> bool:
    names = (it for it in ast.walk(tree) if isinstance(it, ast.Name))
    return any(it.id == name and isinstance(it.ctx, ast.Store) for it in names)


def plain_name(function: Any, *, otherwise: str) -> str:
    """Return the name by which a module can define a function: its own or, for example for a lambda, ``otherwise``.

    A wrapper that was made by a call has the name of the function that it wraps. So that both can be in one module, the
    name in the wrapper's own definition is appended.
    """
    while isinstance(function, functools.partial):
        function = cast("Any", function).func
    name = getattr(function, "__name__", "")
    code = function_of(function)
    if hasattr(code, "__wrapped__") and code is not None and code.__code__.co_name != name:
        name = f"{name}_{code.__code__.co_name}"
    return name if name.isidentifier() and not name.startswith("__") else otherwise


def definition_of(value: Any, *, name: str, used_by: str) -> tuple[Any, list[str]]:
    """Return the syntax tree of the definition of a function or class, and the lines of its file.

    Raises:
        ArgumentError: The source is not available. The message has ``name`` and the function ``used_by`` that uses it.
    """
    functions = list(_functions_in(value))
    code = functions[0].__code__ if functions else None
    lines = _lines_of(code) if code is not None else _lines_now(_file_of(value))
    nodes = [*ast.walk(_parsed("".join(lines)))]
    for node in reversed(nodes) if isinstance(value, type) else nodes:  # the last of several classes of one name
        if isinstance(node, ast.ClassDef):
            is_it = isinstance(value, type) and node.name == value.__name__ and (code is None or _holds(node, code))
        else:
            is_it = not isinstance(value, type) and code is not None and _is_code_of(node, code)
        if is_it:
            return node, lines
    needs = f"{used_by} uses {name}, and the source of {name}" if used_by else f"the source of {name}"
    raise ArgumentError(
        f"{needs} is not available, so it cannot be sent to the services; write it in a file or in a notebook's cell"
    )


def _file_of(kind: type) -> str:
    if kind.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        begin = re.compile(rf"^class {kind.__name__}\b", re.MULTILINE)
        return next((file for file, text in reversed(_cells().items()) if begin.search(text)), "")
    try:
        return inspect.getsourcefile(kind) or ""
    except (TypeError, OSError):
        return ""


def _cells() -> dict[str, str]:
    """Return the text of each executed cell of this notebook by its file name, the oldest first."""
    files = [file for file in linecache.cache if "ipykernel" in file or file.startswith("<ipython-input")]
    return {file: "".join(_lines_now(file)) for file in files}


def _holds(node: ast.ClassDef, code: CodeType) -> bool:
    return node.lineno <= code.co_firstlineno <= (node.end_lineno or 0)


def _is_code_of(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, _FUNCTIONS):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return code.co_name == node.name and code.co_firstlineno == first
    if not isinstance(node, ast.Lambda) or code.co_name != "<lambda>":
        return False
    # Several lambdas may begin in one line: take the one whose body holds the instructions' columns.
    body = node.body
    span = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    places = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if None not in (line, end_line, column, end_column) and (column, end_column) != (0, 0)
    ]
    return bool(places) and min(first for first, _ in places) == span[0] and max(last for _, last in places) == span[1]


def text_of(node: "ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef", lines: list[str]) -> str:
    """Return the text of a definition with its decorators, as code for the top level of a module.

    An indented definition is put below ``if True:``, because removing its indentation would change multi-line
    strings in it.
    """
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = "".join(lines[first - 1 : node.end_lineno]).rstrip("\n")
    return f"if True:\n{text}" if text[:1] in " \t" else text  # not dedent, which would change texts of several lines


def names_used(text: str, *, name: str) -> set[str]:
    """Return the names that the code in ``text`` uses from outside itself, without names such as ``__name__``.

    Raises:
        ArgumentError: The code is not valid at the top level of a module, for example because of ``nonlocal``.
    """
    try:
        module = symtable.symtable(text, name, "exec")
    except SyntaxError as error:
        raise ArgumentError(
            f"{name} cannot be a function of a module: {error.msg}. Keep state in a list or table of the module instead"
        ) from error
    inside = [module]
    for table in inside:
        inside += table.get_children()
    used = {
        symbol.get_name()
        for table in inside
        for symbol in table.get_symbols()
        if symbol.is_declared_global()  # `n += 1` is no reference
        or (
            symbol.is_referenced()
            and (symbol.is_global() or table is module or (table.get_type() == "class" and symbol.is_assigned()))
        )
    }
    return used - _OF_EVERY_MODULE


def names_in_quotes(node: ast.AST) -> set[str]:
    """Return the names in annotations that are strings. A tool's schema evaluates these annotations."""
    written = [getattr(inner, field, None) for inner in ast.walk(node) for field in ("annotation", "returns")]
    texts = [part.value for part in written if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return {inner.id for text in texts for inner in ast.walk(_parsed(text)) if isinstance(inner, ast.Name)}


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])  # an annotation in plain words, or a file that is not Python
