"""Rows of the API as data frames: with the library that is there, and a sentence without it."""

import sys
from typing import Any

import pytest

from headrace.client import HeadraceClient
from headrace.data_frames import frame_of
from shared.errors import UserError
from tests.headrace.scripted_api import event_stream, serving

pytestmark = pytest.mark.unit

ROWS: list[dict[str, Any]] = [{"step": 1.0, "reward": 0.5}, {"step": 2.0, "reward": 0.75, "kl": 0.1}]


def test_without_the_library_the_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UserError, match=r"needs the package polars.*`pip install polars`"):
        frame_of(ROWS, "polars")


def test_an_unknown_library_is_refused() -> None:
    unknown: Any = "cudf"
    with pytest.raises(UserError, match="'cudf' is not known; it is 'pandas' or 'polars'"):
        frame_of(ROWS, unknown)


@pytest.mark.parametrize("what", ["metrics", "evaluations", "rollouts"])
def test_lists_of_rows_are_data_frames_of_pandas(what: str) -> None:
    pytest.importorskip("pandas")
    pages = [{what: ROWS[:1], "next_cursor": "next"}, {what: ROWS[1:], "next_cursor": None}]
    with serving(lambda asked: pages["cursor" in asked.path]) as api, HeadraceClient(api.url, "k") as client:
        found: Any = getattr(client, what)("run-a", dataframe="pandas")
        assert getattr(client, what)("run-a") == ROWS
    assert found["step"].tolist() == [1.0, 2.0]
    assert found["kl"].isna().tolist() == [True, False]


def test_lists_of_rows_are_data_frames_of_polars() -> None:
    pytest.importorskip("polars")
    found = frame_of([*ROWS, {"step": 3.0, "spans": [[0, 5, 1]]}], "polars")
    assert found["step"].to_list() == [1.0, 2.0, 3.0]
    assert found["kl"].to_list() == [None, 0.1, None]
    assert found["spans"].to_list()[2] == [[0, 5, 1]]


def test_events_are_a_data_frame_once_the_run_has_ended() -> None:
    pytest.importorskip("pandas")
    run = {"run_id": "run-a", "status": "finished"}
    stream = event_stream(("1", "metrics", {"step": 1.0}), ("2", "status", {"status": "finished", "final": True}))
    with (
        serving(lambda asked: stream if asked.path.endswith("/events") else run) as api,
        HeadraceClient(api.url, "k") as client,
    ):
        found = client.event_frame("run-a")
    assert found["kind"].tolist() == ["metrics", "status"]
    assert found["data"][0] == {"step": 1.0}
