"""Commands in the sentences of the pages, such as `headrace runs --tag TAG`, name what exists."""

import re
import shlex

import pytest

from headrace.cli.command_line import make_parser
from tests.documentation.page_blocks import PAGES, text_without_blocks
from tests.documentation.programs import check_make

pytestmark = pytest.mark.unit

_COMMAND = re.compile(r"`((?:headrace|make) [a-z][^`\n]*)`")
_OF_TWO_WORDS = ("keys", "rewards")
COMMANDS = sorted({command for page in PAGES for command in _COMMAND.findall(text_without_blocks(page))})


def test_the_sentences_have_commands() -> None:
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("command", COMMANDS)
def test_an_inline_command_and_its_options_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        check_make(words)
        return
    name = words[: 2 if words[0] in _OF_TWO_WORDS else 1]
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([*name, "--help"])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options <= set(re.findall(r"--[a-z][a-z-]*", said.out))
