"""Untrusted text is printed on a terminal without being interpreted."""

import pytest

from headrace.terminal import console, printable

pytestmark = pytest.mark.unit


def test_control_characters_are_written_out_and_lines_stay_lines() -> None:
    assert printable("a\x1b[31mred\x07\x9b2J\x7f\r") == r"a\x1b[31mred\x07\x9b2J\x7f\r"
    assert printable("one\n\ttwo") == "one\n\ttwo"


def test_characters_that_utf_8_cannot_encode_are_escaped() -> None:
    assert printable("\ud800!") == r"\ud800!"


def test_text_of_all_languages_stays_as_it_is() -> None:
    text = "größer 日本語 می‌خواهم 👩‍🔬 1\u00a0000"
    assert printable(text) == text


def test_a_name_with_colons_is_not_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console(pipe_width=80).print("my_rewards:boom: it failed", markup=False)
    assert capsys.readouterr().out == "my_rewards:boom: it failed\n"
