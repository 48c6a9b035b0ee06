"""The pages of the documentation lead to each other."""

import re
from pathlib import Path

import pytest

from shared.redis.run_record import Progress

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def text_of(page: Path) -> str:
    """Return a page without its blocks of code, in which brackets are not links."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


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


def test_the_page_of_the_api_has_every_field_of_a_runs_progress() -> None:
    page = (DOCS / "http-api.md").read_text(encoding="utf-8")
    table = page.partition("\n### Progress\n")[2].partition("\n### ")[0]
    named = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
    # The run itself has waiting_kind, with the causes that only the run API sees.
    assert {*named, "waiting_kind"} == {*Progress.__struct_fields__}
