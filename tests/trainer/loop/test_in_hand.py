"""Which groups count as the cause of a rank's death, over several incarnations, each of which opens the file again."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from services.trainer.loop.in_hand import FILE, GroupsInHand
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.ranks import RankLostError
from shared.errors import MessageError, UnavailableError
from tests.groups import scored_group


class Died(BaseException):
    """Ends a block like the end of the process: nothing more is written."""


async def die_with(run_dir: Path, *numbers: int) -> None:
    """Play a rank that is killed while it processes these groups."""
    in_hand = GroupsInHand(run_dir)
    with pytest.raises(Died):
        async with in_hand.holding(numbers):
            raise Died


async def test_a_batch_that_was_made_leaves_no_suspects(tmp_path: Path) -> None:
    first = GroupsInHand(tmp_path)
    assert set(first.suspects) == set()
    async with first.holding([4, 5]):
        assert json.loads((tmp_path / FILE).read_text())["groups"] == [4, 5]
    assert set(GroupsInHand(tmp_path).suspects) == set()


async def test_every_group_of_the_batch_is_a_suspect_until_it_was_tried_by_itself(tmp_path: Path) -> None:
    await die_with(tmp_path, 4, 5, 6)
    second = GroupsInHand(tmp_path)
    assert set(second.suspects) == {4, 5, 6}
    async with second.holding([4]):
        pass
    await second.acquit(4)
    assert set(second.suspects) == {5, 6}
    assert set(GroupsInHand(tmp_path).suspects) == {5, 6}, "a restart in between changes no suspicion"


async def test_only_a_group_that_was_tried_by_itself_at_the_second_death_is_condemned(tmp_path: Path) -> None:
    await die_with(tmp_path, 4, 5)
    await die_with(tmp_path, 4, 5)
    third = GroupsInHand(tmp_path)
    assert set(third.suspects) == {4, 5}, "after two deaths with both groups, the cause is unknown"
    await die_with(tmp_path, 5)
    fourth = GroupsInHand(tmp_path)
    assert set(fourth.suspects) == {4}
    fourth.refuse_condemned(scored_group("00000004"))
    with pytest.raises(
        MessageError, match="died 3 times while it computed on this group, the last time only on it: it was"
    ):
        fourth.refuse_condemned(scored_group("00000005"))
    fourth.refuse_condemned(scored_group("00000005"))  # an operator has replayed it, so it gets another chance
    assert set(GroupsInHand(tmp_path).suspects) == {4}


async def test_a_condemned_group_stays_so_when_the_rank_ends_before_it_reads_it_again(tmp_path: Path) -> None:
    await die_with(tmp_path, 4, 5)
    await die_with(tmp_path, 5)
    GroupsInHand(tmp_path)  # ends without a group in progress: Redis was unreachable, or the rank was asked to end
    fourth = GroupsInHand(tmp_path)
    assert set(fourth.suspects) == {4}
    with pytest.raises(MessageError, match="died 2 times while it computed on this group"):
        fourth.refuse_condemned(scored_group("00000005"))


async def test_the_only_group_of_a_batch_is_tried_once_more_before_it_is_condemned(tmp_path: Path) -> None:
    await die_with(tmp_path, 5)
    second = GroupsInHand(tmp_path)
    assert set(second.suspects) == {5}
    second.refuse_condemned(scored_group("00000005"))


@pytest.mark.parametrize(
    "error", [NonFiniteError("the loss is nan"), UnavailableError("Redis is away"), asyncio.CancelledError()]
)
async def test_an_expected_error_is_not_a_death(error: BaseException, tmp_path: Path) -> None:
    in_hand = GroupsInHand(tmp_path)
    with pytest.raises(type(error)):
        async with in_hand.holding([4, 5]):
            raise error
    assert set(GroupsInHand(tmp_path).suspects) == set()


@pytest.mark.parametrize("error", [IndexError("index out of range in self"), RankLostError("training rank 1 is gone")])
async def test_an_unexpected_error_and_a_lost_rank_are_deaths_with_last_words(error: Exception, tmp_path: Path) -> None:
    for numbers in ([4, 5], [5]):
        in_hand = GroupsInHand(tmp_path)
        with pytest.raises(type(error)):
            async with in_hand.holding(numbers):
                raise error
    with pytest.raises(MessageError, match=f"only on it: {type(error).__name__}: {error}"):
        GroupsInHand(tmp_path).refuse_condemned(scored_group("00000005"))
    report = json.loads((tmp_path / "post_mortem" / "group_00000005" / "report.json").read_text())
    assert report["last_words"] == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"groups": [-1]}', b'{"groups": "x"}', b"\xff", b"[" * 5000])
def test_an_unreadable_file_makes_no_group_a_suspect(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert set(GroupsInHand(tmp_path).suspects) == set()
    assert "cannot be read" in caplog.text


async def test_a_directory_that_cannot_be_written_stops_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    in_hand = GroupsInHand(tmp_path / "run")
    async with in_hand.holding([4]):
        pass
    assert "could not be written" in caplog.text
