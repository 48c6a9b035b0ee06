"""The pages of the documentation lead to each other, and the commands and run files on them are accepted."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from headrace.cli.command_line import make_parser
from headrace.client import HeadraceClient
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
TO_BE_TYPED = (
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("tutorial", "reading-rollouts", "scoring-from-elsewhere")),
)
"""Pages with `headrace` commands that a reader copies."""


def text_of(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are not links."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def slugs(page: Path) -> set[str]:
    """Return the anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[str, str]]:
    """Return path and anchor of every link to a file of the repository."""
    return re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"{path}#{anchor}"
        if anchor:
            assert anchor in slugs(target), f"{path}#{anchor}"


def test_the_pages_have_links() -> None:
    assert sum(len(links(page)) for page in PAGES) > 200
    assert sum(bool(anchor) for page in PAGES for _, anchor in links(page)) > 50


def test_the_index_leads_to_every_page() -> None:
    linked = {path for path, _ in links(DOCS / "README.md")}
    assert not {page.name for page in DOCS.glob("*.md")} - linked - {"README.md"}


def test_the_readme_leads_to_the_three_doors() -> None:
    assert {"train", "operate", "extend"} <= {
        anchor for path, anchor in links(ROOT / "README.md") if path == "docs/README.md"
    }


@pytest.mark.parametrize("page", TO_BE_TYPED, ids=lambda page: page.name)
def test_every_headrace_command_on_a_page_is_one(page: Path) -> None:
    code = "\n".join(blocks(page, "bash"))
    commands = [shlex.split(line, comments=True) for line in code.splitlines() if line.startswith("headrace ")]
    assert commands
    for words in commands:
        make_parser().parse_args(words[1:])


def test_every_block_of_python_can_be_parsed() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page, "python")]
    assert len(found) > 10
    for page, block in found:
        compile(block, str(page), "exec")


def test_the_client_has_every_method_that_the_notebook_page_calls() -> None:
    called = set(re.findall(r"\bclient\.(\w+)\(", (DOCS / "notebook.md").read_text(encoding="utf-8")))
    assert len(called) > 5
    assert not {name for name in called if not hasattr(HeadraceClient, name)}


@pytest.mark.parametrize("name", ["tutorial", "coming-from-trl", "lora"])
def test_every_run_file_on_a_page_is_accepted(name: str) -> None:
    run_files = [block for block in blocks(DOCS / f"{name}.md", "yaml") if "model:" in block]
    assert run_files
    for block in run_files:
        parse_run_config(yaml.safe_load(block))
