"""Prints the files whose types can be checked without torch and its like: they import none of it, however indirectly.

Run from the root of the repository; the Makefile does.
"""

import ast
import sys
from pathlib import Path

HEAVY = frozenset(
    (
        "torch",
        "vllm",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "datasets",
        "fsspec",
        "pyarrow",
        "matplotlib",
        "promql_parser",
        "cryptography",
        "opentelemetry",
        "mcp",
        "mcp_types",
        "httpx2",
        "websockets",
    )
)
SOURCES = ("services", "shared", "headrace", "tests")


def imports(path: Path) -> set[str]:
    """Return every module a file imports anywhere, and for ``from a import b`` both ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def main() -> int:
    """Print the light files, one a line."""
    files = {
        path.with_suffix("").as_posix().replace("/", "."): path for top in SOURCES for path in Path(top).rglob("*.py")
    }
    needs = {module: imports(path) for module, path in files.items()}
    heavy = {module for module, needed in needs.items() if any(name.split(".")[0] in HEAVY for name in needed)}
    while grown := {module for module, needed in needs.items() if module not in heavy and needed & heavy}:
        heavy |= grown
    sys.stdout.write("".join(f"{path}\n" for module, path in sorted(files.items()) if module not in heavy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
