"""Which files belong to a version of a module."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.user_code.module_sources import (
    MAX_SOURCE_BYTES,
    SourceFile,
    complete,
    version_of,
)
from shared.user_code.places import Places

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def file(module: str, code: str, *, path: str = "/x.py") -> SourceFile:
    return SourceFile(module, path, is_package=False, code=code.encode())


def written(directory: Path, name: str, code: str) -> str:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    return str(path)


def test_one_file_has_the_version_that_sha256sum_shows() -> None:
    assert version_of([file("a", "x = 1")]) == hashlib.sha256(b"x = 1").hexdigest()[:12]


def test_several_files_make_one_version_whatever_their_order_and_wherever_they_lie() -> None:
    first, second = file("a", "x = 1"), file("b", "y = 1")
    assert version_of([first, second]) == version_of([file("b", "y = 1", path="/elsewhere.py"), first])
    changed = [version_of([first, file("b", "y = 2")]), version_of([first, file("c", "y = 1")]), version_of([first])]
    assert len({version_of([first, second]), *changed}) == 4


def test_a_module_is_on_the_path_only_where_its_name_says() -> None:
    places = Places(("/rewards",))
    assert places.holds("mine", "/rewards/mine.py")
    assert places.holds("mine", "/rewards/mine/__init__.py")
    assert places.holds("mine.part", "/rewards/mine/part.py")
    assert not places.holds("numpy", "/rewards/.venv/lib/python3.11/site-packages/numpy/__init__.py")
    assert not places.holds("shared.errors", "/rewards/shared/errors.py")


def test_imports_inside_a_function_belong_to_the_version_in_any_form(tmp_path: Path) -> None:
    code = """
def f():
    import lazy_plain
    import lazy_pack.inner
    from . import nothing_here
    from lazy_pack import other, VALUE
    import json, no_such_module
"""
    recorded = {"main": file("main", code, path=written(tmp_path, "main.py", code))}
    written(tmp_path, "lazy_plain.py", "import lazy_second")
    written(tmp_path, "lazy_second.py", "this is no python")
    written(tmp_path, "json.py", "a library wins")
    for name in ("__init__", "inner", "other"):
        written(tmp_path, f"lazy_pack/{name}.py", "from . import deeper" if name == "inner" else "")
    written(tmp_path, "lazy_pack/deeper.py", "from ..outside import x")
    sys.path.append(str(tmp_path))
    try:
        sources = complete("main", recorded, Places((str(tmp_path),)))
    finally:
        sys.path.remove(str(tmp_path))
    assert [item.module for item in sources.files] == [
        "main",
        "lazy_pack",
        "lazy_pack.deeper",
        "lazy_pack.inner",
        "lazy_pack.other",
        "lazy_plain",
        "lazy_second",
    ]
    assert [item.module for item in sources.files if item.is_package] == ["lazy_pack"]
    assert sources.key == f"main:{sources.version}"


def test_more_source_than_a_worker_is_sent_is_refused() -> None:
    code = "#" * (MAX_SOURCE_BYTES + 1)
    with pytest.raises(UserError, match="main and what it imports have 16777217 bytes of source"):
        complete("main", {"main": file("main", code)}, Places())


MIXED = """
import sys
from pathlib import Path
from shared.user_code.function_loading import load_function, read_function
from shared.user_code.places import Places

directory = sys.argv[1]
places = Places((directory,))
main, part = Path(directory, "main.py"), Path(directory, "pack", "part.py")
main.write_text("from pack import part\\ndef f(**_): return part.VALUE")
versions = []
for value in (1, 2):
    part.write_text(f"VALUE = {value}")
    function, sources = read_function("main:f", places=places)
    versions.append(sources)
    for name in ("main", "pack", "pack.part"):
        sys.modules.pop(name, None)
part.unlink()
first, second, again = (
    load_function("main:f", places=places, sources=sources) for sources in (*versions, versions[0])
)
print(first(), second(), again(), first(), [file.module for file in versions[0].files])
"""


def test_a_process_imports_any_version_from_memory_also_of_a_package_without_init(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MIXED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "1 2 1 1 ['main', 'pack.part']\n", done.stderr


def test_a_module_may_not_import_another_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    base = f"base_{0:024x}"
    written(tmp_path, f"{base}.py", "x = 1")
    importing = file("top", f"def f():\n    import {base}")
    with pytest.raises(UserError, match=f"top imports {base}, which was uploaded by itself"):
        complete("top", {"top": importing}, Places((str(tmp_path),)))
