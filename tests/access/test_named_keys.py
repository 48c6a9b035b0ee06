"""The keys file: which lines are valid, the message for each invalid one, and that no message contains a key."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.access.named_keys import MAX_KEYS, KeysFileError, NamedKey, digest_of, read_keys_file

HASH = "sha256:" + hashlib.sha256(b"a key").hexdigest()
OTHER = "sha256:" + hashlib.sha256(b"another key").hexdigest()


def read(tmp_path: Path, text: str) -> tuple[NamedKey, ...]:
    path = tmp_path / "api-keys"
    path.write_text(text)
    return read_keys_file(path)


def test_a_line_is_a_name_a_hash_scopes_and_perhaps_an_end(tmp_path: Path) -> None:
    ci, notebook = read(
        tmp_path,
        f"# NAME  HASH  SCOPES  EXPIRES\n\nci {HASH} read,submit # of the pipeline\n"
        f"  me@home\t{OTHER.upper().replace('SHA256', 'sha256')} infer 2027-01-31\n",
    )
    assert (ci.name, ci.digest, set(ci.scopes)) == ("ci", digest_of(b"a key"), {"read", "submit"})
    assert ci.expires_at is None
    assert (notebook.name, set(notebook.scopes)) == ("me@home", {"infer"})
    assert notebook.expires_at == datetime(2027, 1, 31, tzinfo=UTC)


def test_a_file_without_keys_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, "") == read(tmp_path, "# nobody yet\n") == ()


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ci {HASH} read", encoding="utf-8-sig")
    (key,) = read_keys_file(file)
    assert key.name == "ci"


def test_a_key_is_written_as_it_is_read(tmp_path: Path) -> None:
    text = f"ci  {HASH}  read,operate  2027-01-31T18:00:00+02:00"
    (key,) = read(tmp_path, text)
    assert key.line() == text


def test_a_key_ends_when_its_day_begins(tmp_path: Path) -> None:
    over, not_yet = read(tmp_path, f"a {HASH} read 2020-01-01\nb {OTHER} read 9999-01-01\n")
    assert over.has_expired()
    assert not not_yet.has_expired()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"ci {HASH}", "line 2: write NAME sha256:HEX SCOPES"),
        (f"ci {HASH} read, submit 2027-01-01 x", "write NAME sha256:HEX SCOPES"),
        ("ci the-key-itself-by-mistake read", "line 2: after the name comes sha256: and 64 hexadecimal digits"),
        (f"ci {HASH[:-1]} read", "after the name comes sha256:"),
        (f"c!i {HASH} read", "a name has 1 to 64 letters"),
        (f"{'c' * 65} {HASH} read", "a name has 1 to 64 letters"),
        (f"api-key {HASH} read", "api-key is reserved"),
        (f"ci {HASH} write", "'write' is not a scope; scopes are read, infer, score, submit, upload, code, operate"),
        (f"ci {HASH} internal", "'internal' is not a scope"),
        (f"ci {HASH} ,", "a key needs a scope"),
        (f"ci {HASH} read tomorrow", "write the time when a key ends as 2027-01-31"),
        (f"ci {HASH} read\nci {OTHER} read", "line 3: there are two keys ci"),
        (f"ci {HASH} read\nnotebook {HASH} read", "line 3: notebook is the same key as ci"),
    ],
)
def test_a_line_that_is_wrong_is_named_by_its_number_and_not_quoted(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(KeysFileError) as raised:
        read(tmp_path, f"# keys\n{line}\n")
    said = str(raised.value)
    assert says in said
    assert str(tmp_path / "api-keys") in said
    assert "by-mistake" not in said
    assert HASH[10:20] not in said


def test_an_invalid_keys_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="No such file"):
        read_keys_file(tmp_path / "nothing")
    with pytest.raises(KeysFileError, match="directory"):
        read_keys_file(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysFileError, match="is not text"):
        read_keys_file(tmp_path / "binary")
    with pytest.raises(KeysFileError, match="is larger than"):
        read(tmp_path, "#" * 1_100_000)
    lines = (f"k{number} sha256:{number:064x} read\n" for number in range(MAX_KEYS + 1))
    with pytest.raises(KeysFileError, match="more than 1000 keys"):
        read(tmp_path, "".join(lines))
