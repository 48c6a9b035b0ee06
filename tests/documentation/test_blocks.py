"""Every block of code on a page is run by a test, or a marker before it says why not (page_blocks.py).

    language       what counts as run
    bash, sh       every command is accepted by its program's parser, or names targets, routes and services that exist
    python         the block is executed; all others are compiled, and their names of ours looked up
    yaml           settings, compose file or chart take it
    json           it has the fields of the route's answers
    anything else  commands after a $; the rest is output or a drawing, and needs the marker

Other tests run some blocks: run_by_other_tests.py. A block with a marker is checked too, as far as it can be.
"""

import re
import subprocess

import pytest

from tests.documentation.page_blocks import BLOCKS, PAGES, ROOT, Block
from tests.documentation.programs import check_command, is_known
from tests.documentation.run_by_other_tests import OTHER_TESTS, WHOLE_PAGES
from tests.documentation.shell_commands import commands_in
from tests.documentation.snippets import check_json, check_python, check_yaml

pytestmark = pytest.mark.unit

_CHECKS = {"json": check_json, "python": check_python, "yaml": check_yaml}


def other_test(block: Block) -> str:
    """Return the file of the test that runs a block; empty if none does."""
    if block.page in WHOLE_PAGES and block.language != "text":
        return WHOLE_PAGES[block.page]
    found = {test for (page, text), test in OTHER_TESTS.items() if page == block.page and text in block.text}
    return found.pop() if found else ""


def check(block: Block) -> bool:
    """Check a block, and return whether all of it counts as run."""
    if block.language in _CHECKS:
        return _CHECKS[block.language](block)
    if not block.shell or (block.reason and block.language == "text"):
        return False
    done = subprocess.run(["bash", "-n"], input=block.shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands = [*commands_in(block.shell)]
    checked = [check_command(command) for command in commands if is_known(command)]
    return any(checked) and all(map(is_known, commands))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    is_run = check(block)
    assert is_run or block.reason or other_test(block), (
        f"{block}: no test runs this block. Put `<!-- not run: REASON -->` in the line before it, or add its test to "
        "tests/documentation/run_by_other_tests.py"
    )


def test_the_pages_have_blocks() -> None:
    assert len(BLOCKS) > 150
    markers = [re.findall(r"^ *<!-- not run:", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES]
    assert sum(map(len, markers)) == sum(bool(block.reason) for block in BLOCKS), "a marker is not before a block"


@pytest.mark.parametrize(("page", "text"), OTHER_TESTS)
def test_another_test_that_runs_a_block_names_its_page(page: str, text: str) -> None:
    assert len([block for block in BLOCKS if block.page == page and text in block.text]) == 1
    assert f'{page.rpartition("/")[2]}"' in (ROOT / OTHER_TESTS[page, text]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", WHOLE_PAGES)
def test_another_test_that_runs_a_whole_page_names_it(page: str) -> None:
    assert f'"{page}"' in (ROOT / WHOLE_PAGES[page]).read_text(encoding="utf-8")
