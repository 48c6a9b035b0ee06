"""A version is sent as its changes or in full, without unnecessary comparisons."""
# pyright: reportPrivateUsage=false

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from services.trainer.push import sent_weights
from services.trainer.push.blame import AttemptError
from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Parcel, announce
from services.trainer.push.push_settings import PushSettings
from shared.control import Transport
from shared.run_options.pushing import PushEncoding
from shared.weights.weight_delta import Bytes, encode_delta
from shared.weights.weight_store import StoreError

pytestmark = pytest.mark.unit


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    wide = torch.zeros(100, 100)
    wide[version] = 1.0
    return [("wide", wide), ("norm", torch.zeros(3))]


def outgoing_to(weight_dir: Path, encoding: PushEncoding) -> Outgoing:
    settings = PushSettings(
        run_id="run",
        incarnation=1,
        internal_key="",
        transport="disk",
        encoding=encoding,
        weight_dir=str(weight_dir),
        push_timeout_s=120.0,
    )
    return Outgoing(settings)


def prepare(
    outgoing: Outgoing, version: int, *, transport: Transport = "disk", staged: tuple[str | None, ...] = ()
) -> Parcel:
    whole = Parcel(version, announce(weights(version)), "full", lambda: weights(version), 40_012)
    return asyncio.run(outgoing.prepare(whole, transport=transport, staged=staged, deadline=time.monotonic() + 120.0))


def write(outgoing: Outgoing, parcel: Parcel) -> Parcel:
    return asyncio.run(outgoing.write(parcel, deadline=time.monotonic() + 120.0))


def remove_old(outgoing: Outgoing) -> None:
    asyncio.run(outgoing.remove_old(deadline=time.monotonic() + 120.0))


@pytest.mark.parametrize(("encoding", "num_compared"), [("full", 0), ("auto", 4), ("delta", 4)])
def test_nothing_is_compared_for_what_is_written_in_full(
    encoding: PushEncoding, num_compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def counted(before: Bytes, after: Bytes, *, item_bytes: int) -> bytes:
        compared.append(item_bytes)
        return encode_delta(before, after, item_bytes=item_bytes)

    monkeypatch.setattr(sent_weights, "encode_delta", counted)
    outgoing = outgoing_to(tmp_path, encoding)
    parcels = [write(outgoing, prepare(outgoing, version)) for version in range(3)]
    assert len(compared) == num_compared  # two parameters, two versions with a predecessor
    assert {parcel.encoding for parcel in parcels[1:]} == {"full" if encoding == "full" else "delta"}
    assert len({parcel.checksum for parcel in parcels}) == 3


def test_a_reading_that_was_given_up_ends_with_the_next_parameter_and_leaves_nothing_to_build_on(
    tmp_path: Path,
) -> None:
    outgoing = outgoing_to(tmp_path, "delta")
    write(outgoing, prepare(outgoing, 0))
    given_up = threading.Event()
    read: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1):
            read.append(name)
            yield name, tensor
            given_up.set()

    whole = Parcel(1, announce(weights(1)), "full", watched, 40_012)
    with pytest.raises(StoreError, match="given up"):
        outgoing._prepare(whole, "disk", (), given_up)
    assert read == ["wide", "norm"]
    assert prepare(outgoing, 1).encoding == "full"


def test_old_versions_are_never_removed_beside_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = outgoing_to(tmp_path, "auto")
    write(outgoing, prepare(outgoing, 0))
    is_removing, may_end = threading.Event(), threading.Event()

    def slow(_: DiskWriter) -> None:
        is_removing.set()
        assert may_end.wait(120.0)

    monkeypatch.setattr(DiskWriter, "remove_old", slow)
    removing = threading.Thread(target=remove_old, args=(outgoing,), daemon=True)
    removing.start()
    assert is_removing.wait(120.0)
    parcel = Parcel(1, announce(weights(1)), "full", lambda: weights(1), 40_012, checksum="of version 1")
    # Whichever of the two deadlines is noticed first.
    with pytest.raises(AttemptError, match=r"still being read, or written to .*, or old ones removed|did not end by"):
        asyncio.run(outgoing.write(parcel, deadline=time.monotonic() + 0.05))
    may_end.set()
    removing.join(120.0)
    assert write(outgoing, parcel).place is not None


def test_a_readable_version_is_the_base_of_a_delta_and_an_unreadable_version_is_written_again(tmp_path: Path) -> None:
    outgoing = outgoing_to(tmp_path, "auto")
    assert [write(outgoing, prepare(outgoing, version)).encoding for version in range(2)] == ["full", "delta"]
    outgoing.distrust()
    remove_old(outgoing)
    again = write(outgoing, prepare(outgoing, 1))
    assert again.encoding == "full"
    assert write(outgoing, prepare(outgoing, 2)).encoding == "delta"
    remove_old(outgoing)
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == [
        "00000001-00000003-v1",
        "00000001-00000004-v2",
    ]
