"""What a call prints, as far as it reaches the log."""

import io

import pytest

from shared.user_code.call_output import CallOutput

pytestmark = pytest.mark.unit


def test_only_the_beginning_of_what_a_call_prints_is_kept_and_the_next_call_begins_anew() -> None:
    log = io.BytesIO()
    output = CallOutput(io.TextIOWrapper(log, encoding="utf-8"), max_chars=10)
    assert output.write("12345\n") == 6
    assert output.write("6789" * 1000) == 4000
    assert output.write("more") == 4
    output.begin_call()
    print("next", file=output)
    says = "\n[The first 10 characters that a call printed. The rest was dropped.]\n"
    assert log.getvalue().decode() == "12345\n6789" + says + "next\n"


def test_nothing_is_said_to_be_dropped_if_a_call_prints_just_as_much_as_it_may() -> None:
    log = io.BytesIO()
    output = CallOutput(io.TextIOWrapper(log, encoding="utf-8"), max_chars=10)
    output.write("123456789\n")
    output.write("")
    assert log.getvalue() == b"123456789\n"
    output.write("x")
    assert log.getvalue().endswith(b"The rest was dropped.]\n")


def test_text_that_cannot_be_encoded_is_escaped() -> None:
    log = io.BytesIO()
    output = CallOutput(io.TextIOWrapper(log, encoding="utf-8"))
    print("\ud800", file=output)
    assert log.getvalue() == b"\\ud800\n"
