"""How long a follower waits for rank 0."""

from typing import Any, cast

import pytest

from services.trainer.ranks import follower
from services.trainer.ranks.rank_commands import End, encode


class SlowGroup:
    """A group of ranks in which collectives may take an hour. Rank 0 reports the end of the run."""

    timeout_s = 3600.0

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def receive(self, rank: int, *, timeout_s: float) -> bytes:
        assert rank == 0
        self.waits_s.append(timeout_s)
        return encode(End())


def test_rank_0_may_be_silent_as_long_as_it_waits_for_a_slower_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(*_: object) -> None:
        pass

    monkeypatch.setattr("services.trainer.ranks.follower.signal.signal", ignore)
    group = SlowGroup()
    follower.follow(cast("Any", group))
    assert group.waits_s == [3600.0]
