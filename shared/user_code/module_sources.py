"""Keeps the Python files of a user's function in memory as a snapshot, and imports modules from the snapshot.

    files on disk --recorded by a separate process--> Sources --used by any process, at any time--> the same modules

A version is a snapshot of the function's own module and of all modules of the operator's directories that are imported
with it or named in an ``import`` of its files. Later changes on disk, such as half-written or deleted files, do
not affect imports from a snapshot, so no worker mixes two versions of a file.

In the service itself, where the rewarder runs async functions, imports at call time use the version that was used last.
Two kinds of modules are in no version and always come from the disk: libraries, and modules whose name is computed at
call time (``importlib.import_module(name)``).
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.util
import linecache
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

from shared.errors import UserError
from shared.user_code.places import Places, is_reserved, is_uploaded, places_of

VERSION_CHARACTERS = 12
MAX_SOURCE_BYTES = 16 * 1024 * 1024


class SourceFile(msgspec.Struct, frozen=True):
    """One module: its dotted name, the path of its file, and the file's content."""

    module: str
    path: str
    is_package: bool
    code: bytes

    def sha256(self) -> str:
        """Return the hash of the file's content."""
        return hashlib.sha256(self.code).hexdigest()


class Sources(msgspec.Struct, frozen=True):
    """One version of a user's module: its own file first, then the files it imports from the operator's directories.

    ``version`` is the first digits of a SHA-256: of the file's content, or with several files, of their listed hashes.
    """

    module: str
    version: str
    files: tuple[SourceFile, ...]

    @property
    def key(self) -> str:
        """The module and its version, unique among all modules."""
        return f"{self.module}:{self.version}"


def version_of(files: Sequence[SourceFile]) -> str:
    """Return the version of a module with these files: the first digits of a SHA-256 of their content."""
    if len(files) == 1:
        return files[0].sha256()[:VERSION_CHARACTERS]
    listed = "".join(f"{file.module} {file.sha256()}\n" for file in sorted(files, key=lambda file: file.module))
    return hashlib.sha256(listed.encode()).hexdigest()[:VERSION_CHARACTERS]


class _MemoryLoader(importlib.abc.InspectLoader):
    """Loads one module from memory, and so ignores cached bytecode and newer files on disk."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    def is_package(self, fullname: str) -> bool:
        return self.file.is_package

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.file.code)

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.file.code, self.file.path)

    def exec_module(self, module: ModuleType) -> None:
        source = self.get_source(module.__name__)
        # Stack traces then show the lines that ran, not the current lines of the file.
        linecache.cache[self.file.path] = (len(source), None, source.splitlines(keepends=True), self.file.path)
        exec(self.get_code(module.__name__), vars(module))

    def spec(self) -> ModuleSpec | None:
        """Return an import spec that loads the module from memory."""
        places = [str(Path(self.file.path).parent)] if self.file.is_package else None
        return importlib.util.spec_from_file_location(
            self.file.module, self.file.path, loader=self, submodule_search_locations=places
        )


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds modules in memory. While recording, it first reads modules of the operator's directories into memory."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}
        self._used: dict[str, str] = {}  # by module: the key of the version that was used last
        self._chosen: dict[str, ModuleSpec] = {}
        self._recording: tuple[str, Places, dict[str, SourceFile]] | None = None
        self._recorded: dict[str, dict[str, SourceFile]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module in memory or a chosen one; None lets Python's next finder look for the module."""
        if self._recording is not None:
            file = self._record(fullname, path, *self._recording)
        else:
            file = self._files.get(fullname)
        return self._chosen.get(fullname) if file is None else _MemoryLoader(file).spec()

    def choose(self, specs: Mapping[str, ModuleSpec]) -> None:
        """Import these modules only with these specs, unless a version of them is in memory."""
        self._chosen |= specs

    @contextlib.contextmanager
    def recording(self, module: str, places: Places) -> Generator[dict[str, SourceFile]]:
        """Yield a dict that collects ``module``, and modules of the operator's directories, as they are imported.

        It has the modules of earlier recordings of ``module`` too, because they are not imported again.
        """
        recorded = self._recorded.setdefault(module, {})
        self._recording = (module, places, recorded)
        try:
            yield recorded
        finally:
            self._recording = None

    def use(self, sources: Sources) -> None:
        """Make later imports use this version of a user's module and its files, and forget their other versions.

        All modules of the version are imported anew: a module that stayed would refer to old versions of the others.
        """
        is_same = self._used.get(sources.module) == sources.key
        if is_same and all(self._files.get(file.module) == file for file in sources.files):
            return
        self._used[sources.module] = sources.key
        for file in sources.files:
            _forget(file.module)
            self._files[file.module] = file

    def forget(self, module: str) -> None:
        """Remove a module that is no longer needed from memory and from ``sys.modules``."""
        _forget(module)
        self._used.pop(module, None)
        self._chosen.pop(module, None)
        if file := self._files.pop(module, None):
            linecache.cache.pop(file.path, None)

    def _record(
        self,
        name: str,
        path: Sequence[str] | None,
        module: str,
        places: Places,
        into: dict[str, SourceFile],
    ) -> SourceFile | None:
        if name in sys.builtin_module_names:
            return None
        spec = self._chosen.get(name) or PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if name != module and not places.holds(name, spec.origin):
            return None
        is_package = spec.submodule_search_locations is not None
        into[name] = SourceFile(name, spec.origin, is_package, _read(Path(spec.origin)))
        return into[name]


def forget_imported(sources: Sources) -> None:
    """Remove the modules of this version from ``sys.modules``, so that they are imported again."""
    for file in sources.files:
        _forget(file.module)


def _forget(module: str) -> None:
    loaded = sys.modules.get(module)
    if loaded is None or not isinstance(getattr(loaded.__spec__, "loader", None), _MemoryLoader):
        return
    del sys.modules[module]
    parent, _, child = module.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], child, None) is loaded:
        delattr(sys.modules[parent], child)


_finder = SourceFinder()


def finder() -> SourceFinder:
    """Return this process's finder. Python asks it before all other finders."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return _finder


def is_on_disk(files: Iterable[SourceFile]) -> bool:
    """Return whether the files on disk still have the recorded content."""
    try:
        return all(Path(file.path).read_bytes() == file.code for file in files)
    except OSError:
        return False


def complete(module: str, recorded: Mapping[str, SourceFile], places: Places) -> Sources:
    """Return the recorded version of ``module``, plus the modules that it imports only when its functions are called.

    Raises:
        UserError: The files together are too large to keep, a file cannot be read, or one is another upload.
    """
    files = dict(recorded)
    unread = list(files.values())
    while unread:
        for name in _imports(unread.pop()):
            path = None if name in files else _find(name, places)
            if path is not None:
                files[name] = SourceFile(name, str(path), path.name == "__init__.py", _read(path))
                unread.append(files[name])
    if others := [name for name in files if name != module and is_uploaded(name)]:
        raise UserError(
            f"{module} imports {others[0]}, which was uploaded by itself and may expire; put both in one file"
        )
    total = sum(len(file.code) for file in files.values())
    if total > MAX_SOURCE_BYTES:
        raise UserError(f"{module} and what it imports have {total} bytes of source, more than {MAX_SOURCE_BYTES}")
    ordered = sorted(files.values(), key=lambda file: (file.module != module, file.module))
    return Sources(module, version_of(ordered), tuple(ordered))


def _find(module: str, places: Places) -> Path | None:
    """Return the file of a module in the operator's directories, without importing it; None if it has none there."""
    top = module.partition(".")[0]
    if is_reserved(top):
        return None
    spec = PathFinder.find_spec(top)
    if spec is None or (spec.origin is not None and not places.holds(top, spec.origin)):
        return None  # a library, which Python finds before them
    candidates = (path for directory in places.directories for path in reversed(places_of(module, directory)))
    return next((path for path in candidates if path.is_file()), None)


def _imports(file: SourceFile) -> Iterator[str]:
    """Yield every module that a file may import, anywhere in it. Some of the names may not be modules."""
    try:
        tree = ast.parse(file.code)
    except (SyntaxError, ValueError, RecursionError):
        return
    package = file.module if file.is_package else file.module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if base is not None:
                yield from _with_parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _absolute(node: ast.ImportFrom, package: str) -> str | None:
    if not node.level:
        return node.module
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return None


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: index + 1]) for index in range(len(parts)))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path.name} cannot be read ({error.strerror})") from error
