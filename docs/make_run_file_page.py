"""Writes run-file.md from the settings themselves: ``python docs/make_run_file_page.py``. A test compares the two."""

import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from shared.run_config import RunConfig

PAGE = Path(__file__).with_name("run-file.md")
HEAD = """# The run file

YAML or JSON, given to `headrace submit` or as the body of `POST /v1/runs`. Names are those of TRL's `GRPOConfig`
wherever the meaning is the same. Unknown keys are refused. Paths may be relative to the run file; over HTTP they are
absolute.

| key | type | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """Return the page as it should be."""
    rows: list[str] = []
    for name, field in RunConfig.model_fields.items():
        annotation = RunConfig.__annotations__[name]
        kind = annotation.__name__ if type(annotation) is type else str(annotation)
        default = "**required**" if field.default is PydanticUndefined else f"`{field.default}`"
        meaning = (field.description or "as in TRL").replace("|", "\\|")
        rows.append(f"| `{name}` | {_plain(kind)} | {default} | {meaning} |")
    return HEAD + "\n".join(rows) + "\n"


def _plain(kind: str) -> str:
    kind = kind.replace("typing.", "")
    if kind.startswith("Literal"):
        return kind.removeprefix("Literal[").removesuffix("]").replace("'", "`")
    return ("float" if kind.startswith("Annotated[float") else kind).replace("|", "or")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
