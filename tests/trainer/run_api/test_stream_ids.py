"""Stream ids from clients: an id that Redis would refuse is never sent to it."""

import pytest

from services.trainer.run_api.stream_ids import parse_stream_id

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("text", ["0-0", "1763635200123-0", "18446744073709551615-0"])
def test_an_id_is_an_id(text: str) -> None:
    assert parse_stream_id(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "1", "-", "1-", "a-b", "1-0 ", "1-0\n", "18446744073709551616-0", "18446744073709551615-18446744073709551615"],
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_stream_id(text) is None
