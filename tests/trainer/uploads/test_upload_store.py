"""Uploads on the disk: resumed, checked, shared between sets, confined, expired."""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.trainer.problems import Problem
from services.trainer.uploads.upload_store import SetState, UploadStore
from shared.files.file_set import SetFile
from tests.small_disk import small_disk

pytestmark = pytest.mark.unit

ROWS = b'{"prompt": "1 + 1 ="}\n'
LONG_AGO_S = 1_000_000_000


def described(path: str, data: bytes) -> SetFile:
    return SetFile(path, len(data), hashlib.sha256(data).hexdigest())


def send(store: UploadStore, upload_id: str, data: bytes, *, of: bytes | None = None, offset: int = 0) -> SetState:
    """Send a piece of the file ``of``, which is the whole of it by default."""
    sha256 = hashlib.sha256(data if of is None else of).hexdigest()
    part = store.open_part(upload_id, sha256, offset=offset, size=len(data))
    try:
        part.write(data)
    finally:
        part.close()
    if part.received == part.file.size:
        store.check_part(part)
    return store.close_part(upload_id, part)


@pytest.fixture
def store(tmp_path: Path) -> UploadStore:
    directory = tmp_path / "uploads"
    directory.mkdir()
    return UploadStore(directory, max_bytes=1000, keep_free_bytes=0)


def make_old(store: UploadStore) -> None:
    """Let everything in a store look unused for long."""
    for path in store.directory.rglob("*"):
        if path.is_dir() or path.name == "manifest.json":
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))


def test_a_directory_of_several_files_arrives_as_it_was(store: UploadStore) -> None:
    files = {"state.json": b"{}", "data/one.arrow": b"one" * 50, "data/two.arrow": b"two" * 60, "empty": b""}
    began = store.begin([described(path, data) for path, data in files.items()])
    assert not began.is_complete
    for data in [b"{}", b"one" * 50, b"two" * 60]:
        done = send(store, began.upload_id, data)
    assert done.is_complete
    assert done.path == f"{store.directory}/{began.upload_id}"
    here = Path(done.path)
    assert {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()} == files
    assert not any((store.directory / ".incoming").iterdir())


def test_an_upload_goes_on_where_it_broke_off(store: UploadStore) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    send(store, began.upload_id, ROWS[:5], of=ROWS)
    again = store.begin([described("train.jsonl", ROWS)])
    assert (again.upload_id, again.files[0].received, again.is_complete) == (began.upload_id, 5, False)
    done = send(store, began.upload_id, ROWS[5:], of=ROWS, offset=5)
    assert (Path(done.path) / "train.jsonl").read_bytes() == ROWS


def test_a_piece_that_does_not_follow_is_refused_with_the_offset_that_does(store: UploadStore) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    send(store, began.upload_id, ROWS[:5], of=ROWS)
    for offset in (0, 4, 6):
        with pytest.raises(Problem) as refused:
            send(store, began.upload_id, ROWS[offset : offset + 2], of=ROWS, offset=offset)
        assert (refused.value.status, refused.value.body["received"]) == (409, 5)


def test_bytes_with_another_hash_are_deleted_and_can_be_sent_again(store: UploadStore) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    with pytest.raises(Problem) as refused:
        send(store, began.upload_id, b"x" * len(ROWS), of=ROWS)
    assert (refused.value.status, refused.value.body["type"]) == (422, "/problems/wrong-hash")
    assert hashlib.sha256(b"x" * len(ROWS)).hexdigest() in refused.value.body["detail"]
    assert store.state(began.upload_id).files[0].received == 0
    assert send(store, began.upload_id, ROWS).is_complete


def test_more_bytes_than_announced_are_refused(store: UploadStore) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    with pytest.raises(Problem, match="beyond its end"):
        send(store, began.upload_id, ROWS + b"x", of=ROWS)
    part = store.open_part(began.upload_id, described("x", ROWS).sha256, offset=0, size=-1)
    with pytest.raises(Problem, match="beyond its end"):
        part.write(ROWS + b"x")
    part.close()


def test_a_full_disk_that_shows_only_when_the_file_is_synced_is_told_as_such(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as NFS does

    began = store.begin([described("train.jsonl", ROWS)])
    with monkeypatch.context() as during:
        during.setattr(os, "fsync", fsync)
        with pytest.raises(Problem) as refused:
            send(store, began.upload_id, ROWS)
    assert (refused.value.status, refused.value.body["type"]) == (507, "/problems/no-space-for-uploads")
    # A piece of no bytes has the file checked again.
    assert send(store, began.upload_id, b"", of=ROWS, offset=len(ROWS)).is_complete


def test_last_bytes_that_come_after_another_request_has_completed_the_set_are_told_so(store: UploadStore) -> None:
    files = [described("a.jsonl", ROWS), described("b.jsonl", b"{}")]
    began = store.begin(files)
    late = store.open_part(began.upload_id, files[0].sha256, offset=0, size=len(ROWS))
    late.write(ROWS)
    late.close()
    other = store.begin([described("other.jsonl", ROWS)])
    send(store, other.upload_id, ROWS)
    store.begin(files)  # finds a.jsonl in the other set
    assert send(store, began.upload_id, b"{}").is_complete
    with pytest.raises(Problem) as refused:
        store.close_part(began.upload_id, late)
    assert refused.value.body["type"] == "/problems/no-such-upload"


def test_a_set_that_is_there_is_not_sent_again(store: UploadStore) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    send(store, began.upload_id, ROWS)
    again = store.begin([described("train.jsonl", ROWS)])
    assert again.is_complete
    with pytest.raises(Problem) as refused:
        send(store, began.upload_id, ROWS)
    assert refused.value.body["type"] == "/problems/no-such-upload"


def test_a_file_of_another_set_is_not_sent_again(store: UploadStore) -> None:
    weights = b"w" * 300
    first = store.begin([described("model.safetensors", weights), described("tokenizer.json", b"old")])
    send(store, first.upload_id, weights)
    send(store, first.upload_id, b"old")
    second = store.begin([described("model.safetensors", weights), described("tokenizer.json", b"new")])
    assert {file.path: file.is_whole for file in second.files} == {"model.safetensors": True, "tokenizer.json": False}
    done = Path(send(store, second.upload_id, b"new").path)
    assert (done / "model.safetensors").read_bytes() == weights
    assert (done / "model.safetensors").samefile(store.directory / first.upload_id / "model.safetensors")


def test_a_set_of_files_that_are_all_there_is_complete_at_once(store: UploadStore) -> None:
    first = store.begin([described("a.jsonl", ROWS)])
    send(store, first.upload_id, ROWS)
    assert store.begin([described("b.jsonl", ROWS), described("c.jsonl", ROWS)]).is_complete


def test_without_hard_links_files_are_copied_and_survive_a_power_loss(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def link(_source: Path, _target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "link", link)
    began = store.begin([described("a.jsonl", ROWS), described("same.jsonl", ROWS)])
    done = send(store, began.upload_id, ROWS)
    for name in ("a.jsonl", "same.jsonl"):
        assert (Path(done.path) / name).read_bytes() == ROWS
        assert (Path(done.path) / name).stat().st_ino in synced
    assert not any((store.directory / ".incoming").iterdir())


def test_a_known_file_that_cannot_be_linked_is_never_there_in_part(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.begin([described("a.jsonl", ROWS)])
    send(store, first.upload_id, ROWS)

    def link(_source: Path, _target: Path) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    def copy_a_part(_source: Path, target: Path) -> None:
        target.write_bytes(ROWS[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as during, contextlib.suppress(Problem):
        during.setattr(os, "link", link)
        during.setattr(shutil, "copyfile", copy_a_part)
        assert not store.begin([described("b.jsonl", ROWS)]).is_complete
    done = store.begin([described("b.jsonl", ROWS)])
    assert done.is_complete
    assert (Path(done.path) / "b.jsonl").read_bytes() == ROWS


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "a\0b", ".", "a//b"])
def test_a_path_that_leaves_the_upload_is_refused_and_nothing_is_written(store: UploadStore, path: str) -> None:
    with pytest.raises(Problem) as refused:
        store.begin([described("good", b"good"), described(path, b"evil")])
    assert refused.value.status == 422
    assert not any(store.directory.iterdir())


def test_a_link_in_place_of_a_part_is_not_followed(store: UploadStore, tmp_path: Path) -> None:
    began = store.begin([described("train.jsonl", ROWS)])
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    part = store.directory / ".incoming" / began.upload_id / f"{described('x', ROWS).sha256}.part"
    part.symlink_to(outside)
    with pytest.raises(Problem) as refused:
        send(store, began.upload_id, ROWS)
    assert refused.value.status == 503
    assert outside.read_bytes() == b""


def test_an_upload_that_is_too_large_is_refused_with_the_setting(store: UploadStore) -> None:
    with pytest.raises(Problem, match="HEADRACE_MAX_UPLOAD_BYTES") as refused:
        store.begin([described("big", b"x" * 600), described("bigger", b"y" * 401)])
    assert refused.value.status == 413
    assert not store.begin([described("big", b"x" * 600), described("same", b"x" * 600)]).is_complete


@pytest.mark.parametrize("data", [ROWS, b""])
def test_without_space_an_upload_is_refused_before_it_begins(tmp_path: Path, data: bytes) -> None:
    store = UploadStore(tmp_path, max_bytes=1000, keep_free_bytes=1 << 60)
    with pytest.raises(Problem, match="HEADRACE_UPLOADS_KEEP_FREE_BYTES") as refused:
        store.begin([described("train.jsonl", data)])
    assert (refused.value.status, refused.value.body["type"]) == (507, "/problems/no-space-for-uploads")


def test_a_piece_that_fills_the_disk_does_not_count_and_the_upload_goes_on_later() -> None:
    with small_disk(size_kib=256) as disk:
        store = UploadStore(disk, max_bytes=1 << 30, keep_free_bytes=0)
        data = b"x" * 200_000
        began = store.begin([described("big", data)])
        send(store, began.upload_id, data[:1000], of=data)
        (disk / "other").write_bytes(b"y" * 150_000)
        part = store.open_part(began.upload_id, described("big", data).sha256, offset=1000, size=10)
        with pytest.raises(OSError, match="No space left") as full:
            part.write(data[1000:])
        assert full.value.errno == errno.ENOSPC
        part.undo()
        part.close()
        refusal = store.disk.in_words(full.value)
        assert refusal.status == 507
        assert "no space for this upload" in refusal.body["detail"]
        with pytest.raises(Problem) as refused:  # it is known before the bytes come
            store.open_part(began.upload_id, described("big", data).sha256, offset=1000, size=150_000)
        assert refused.value.status == 507
        (disk / "other").unlink()
        assert store.begin([described("big", data)]).files[0].received == 1000
        assert send(store, began.upload_id, data[1000:], of=data, offset=1000).is_complete


def have_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the disk have this much free space."""

    def usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(free=num_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_pieces_at_the_same_time_leave_the_space_that_is_kept_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UploadStore(tmp_path, max_bytes=1000, keep_free_bytes=100)
    one, other = described("a", b"a" * 40), described("b", b"b" * 40)
    began = store.begin([one, other])
    have_free(monkeypatch, 150)
    part = store.open_part(began.upload_id, one.sha256, offset=0, size=40)
    with pytest.raises(Problem, match="HEADRACE_UPLOADS_KEEP_FREE_BYTES"):
        store.open_part(began.upload_id, other.sha256, offset=0, size=40)
    part.close()
    store.open_part(began.upload_id, other.sha256, offset=0, size=40).close()


def test_copies_on_a_file_system_without_links_leave_the_space_that_is_kept_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    store = UploadStore(tmp_path, max_bytes=1_000_000, keep_free_bytes=5000)
    data = b"x" * 100_000
    began = store.begin([described("one", data), described("two", data)])
    part = store.open_part(began.upload_id, described("one", data).sha256, offset=0, size=len(data))
    part.write(data)
    part.close()
    have_free(monkeypatch, 50_000)  # enough for the directory, and not for a copy
    with pytest.raises(Problem, match="HEADRACE_UPLOADS_KEEP_FREE_BYTES"):
        store.close_part(began.upload_id, part)
    assert not [*tmp_path.rglob("whole")]
    monkeypatch.undo()
    assert store.begin([described("one", data), described("two", data)]).is_complete


def test_what_nobody_used_for_long_expires(store: UploadStore) -> None:
    whole = store.begin([described("a.jsonl", ROWS)])
    send(store, whole.upload_id, ROWS)
    half = store.begin([described("b.jsonl", ROWS + ROWS)])
    send(store, half.upload_id, ROWS, of=ROWS + ROWS)
    assert store.expire([], after_s=3600) == 0
    make_old(store)
    assert store.expire([], after_s=3600) == 2
    assert not [path for path in store.directory.rglob("*") if path.is_file()]
    assert not store.begin([described("a.jsonl", ROWS)]).is_complete


@pytest.mark.parametrize("spelling", ["{}/a.jsonl", "{}", "file://{}/a.jsonl", "/{}//a.jsonl", "/linked{}/a.jsonl"])
def test_a_set_that_a_run_names_does_not_expire(store: UploadStore, spelling: str) -> None:
    done = store.begin([described("a.jsonl", ROWS)])
    send(store, done.upload_id, ROWS)
    make_old(store)
    assert store.expire([spelling.format(done.path), "gsm8k"], after_s=3600) == 0
    assert (Path(done.path) / "a.jsonl").read_bytes() == ROWS
    assert Path(done.path).stat().st_mtime > time.time() - 3600  # the time counts from this use on
    assert store.expire([], after_s=3600) == 0


def test_a_set_that_a_run_names_does_not_expire_although_it_cannot_be_touched(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = store.begin([described("a.jsonl", ROWS)])
    send(store, done.upload_id, ROWS)
    make_old(store)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.expire([done.path], after_s=3600) == 0
    assert store.begin([described("a.jsonl", ROWS)]).is_complete


def test_a_set_that_expired_only_in_part_does_not_count_as_complete(
    store: UploadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [described("a.jsonl", ROWS), described("b.jsonl", b"{}")]
    began = store.begin(files)
    for data in (ROWS, b"{}"):
        done = send(store, began.upload_id, data)
    make_old(store)

    def delete_one_file(directory: Path, **_: bool) -> None:
        (directory / "a.jsonl").unlink()
        raise KeyboardInterrupt  # as if the process were killed now

    with monkeypatch.context() as during:
        during.setattr(shutil, "rmtree", delete_one_file)
        with pytest.raises(KeyboardInterrupt):
            store.expire([], after_s=3600)
    assert not Path(done.path).exists()
    assert store.begin(files).path == done.path
    assert sorted(path.name for path in Path(done.path).iterdir()) == ["a.jsonl", "b.jsonl"]
    make_old(store)
    assert store.expire([], after_s=3600) == 2  # what was left half deleted is too
    assert not any((store.directory / ".incoming").iterdir())


def test_the_answer_that_a_set_is_there_keeps_it_there(store: UploadStore) -> None:
    done = store.begin([described("a.jsonl", ROWS)])
    send(store, done.upload_id, ROWS)
    make_old(store)
    assert store.begin([described("a.jsonl", ROWS)]).is_complete
    assert store.expire([], after_s=3600) == 0


def test_text_that_looks_like_an_upload_touches_nothing_else(store: UploadStore, tmp_path: Path) -> None:
    os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S))
    store.use(f"{store.directory}/..", f"{store.directory}/sha256-../..", f"{store.directory}/", "")
    assert tmp_path.stat().st_mtime == LONG_AGO_S


def test_empty_files_leave_inodes_for_the_runs() -> None:
    with small_disk(65536, max_files=2000) as disk:
        store = UploadStore(disk, max_bytes=1000, keep_free_bytes=0)
        with pytest.raises(Problem, match="files and directories are to come") as refused:  # noqa: PT012
            for number in range(100):
                store.begin([described(f"{number}/{part}/a/b/c/d/e/f", b"") for part in range(50)])
        assert refused.value.status == 507
        assert os.statvfs(disk).f_favail >= 100


def test_a_set_has_at_most_a_thousand_directories(tmp_path: Path) -> None:
    store = UploadStore(tmp_path, max_bytes=1000, keep_free_bytes=0)
    with pytest.raises(Problem, match="there are 1050 directories, and a set has at most 1000") as refused:
        store.begin([described(f"{part}/a/b/c/d/e/f/g", b"") for part in range(150)])
    assert refused.value.status == 422
