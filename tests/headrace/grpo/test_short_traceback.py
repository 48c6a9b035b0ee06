"""Ctrl-C shows a script's own frames, and none of what ran below the call."""

import traceback

import pytest

from headrace.grpo.short_traceback import short_on_ctrl_c

pytestmark = pytest.mark.unit


def waits() -> None:
    try:
        int("an empty queue")
    except ValueError:
        raise KeyboardInterrupt  # noqa: B904  pressed while the error is handled


@short_on_ctrl_c
def train() -> None:
    waits()


@short_on_ctrl_c
def fails() -> None:
    raise ValueError("no data")


def test_an_interrupt_has_no_frames_below_the_call() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        train()
    shown = "".join(traceback.format_exception(raised.value))
    assert "an empty queue" not in shown
    assert "in waits" not in shown
    assert "train()" in shown, "the caller's line"
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][1:] == ["call"]


def test_an_error_keeps_its_frames() -> None:
    with pytest.raises(ValueError, match="no data") as raised:
        fails()
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "fails"
