"""Which keys a service accepts: the ones it was started with, and the ones in a keys file that changes."""

import logging
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr, ValidationError

from shared.access.keyring import Keyring, keys_file_gauge
from shared.access.named_keys import KeysFileError, NamedKey, digest_of, read_keys_file
from shared.access.route_table import SCOPES, Scope
from shared.errors import UserError
from shared.settings import ServiceSettings


def line(name: str, *scopes: Scope, expires: str = "") -> str:
    key = NamedKey(name, digest_of(f"key of {name}".encode()), frozenset(scopes))
    return f"{key.line()} {expires}\n"


def name_of(keyring: Keyring, shown: str) -> str | None:
    key = keyring.find(shown.encode(), "read")
    return None if key is None else key.name


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "api-keys"
    path.write_text(line("ci", "read", "submit"))
    return path


def test_one_key_is_a_keyring_of_one_with_every_scope() -> None:
    keyring = Keyring(api="the one")
    key = keyring.find(b"the one", "operate")
    assert key is not None
    assert (key.name, set(key.scopes)) == ("api-key", set(SCOPES))
    assert keyring.find(b"the on", "operate") is None
    assert not keyring.is_open_to_all("read")
    assert keyring.is_open_to_all("internal"), "the service has no internal key"


def test_named_keys_stand_beside_the_one(file: Path) -> None:
    keyring = Keyring(api="the one", file=file)
    assert name_of(keyring, "key of ci") == "ci"
    assert name_of(keyring, "the one") == "api-key"
    assert name_of(keyring, "key of nobody") is None


def test_a_keys_file_closes_a_service_that_has_no_other_key(file: Path) -> None:
    file.write_text("")
    assert not Keyring(file=file).is_open_to_all("read")
    assert Keyring().is_open_to_all("read")


def test_named_keys_are_keys_enough_for_a_service_that_others_reach(file: Path) -> None:
    internal = SecretStr("secret")
    assert (
        ServiceSettings(host="0.0.0.0", api_keys_file=file, internal_key=internal).keyring().find(b"key of ci", "read")
    )
    with pytest.raises(ValidationError, match="set HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY first"):
        ServiceSettings(host="0.0.0.0", internal_key=internal)


def test_a_key_between_services_opens_nothing_else_unless_both_are_the_same() -> None:
    keyring = Keyring(api="public", internal="secret")
    assert keyring.find(b"secret", "read") is None
    assert keyring.find(b"public", "internal") is None
    same = Keyring(api="one", internal="one")
    assert same.find(b"one", "read") is not None
    assert same.find(b"one", "internal") is not None


def test_a_changed_file_is_read_again_and_the_changes_are_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring(api="the one", file=file, look_every_s=0)
    ci = keyring.find(b"key of ci", "read")
    assert ci is not None
    assert keyring.allows(ci, "submit")
    with caplog.at_level(logging.INFO):
        file.write_text(line("ci", "read") + line("notebook", "infer"))
        assert name_of(keyring, "key of notebook") == "notebook"
    assert caplog.messages == ["HEADRACE_API_KEYS_FILE was read again: 2 keys; new: notebook; changed: ci"]
    assert not keyring.allows(ci, "submit"), "its scope was removed"
    assert keyring.allows(ci, "read")
    file.write_text(line("notebook", "infer"))
    assert name_of(keyring, "key of ci") is None
    assert not keyring.allows(ci, "read")


def test_a_file_that_is_replaced_by_another_is_read_again(file: Path, tmp_path: Path) -> None:
    """Replace a file as Kubernetes and editors do: the path then leads to another file, perhaps of the same size."""
    keyring = Keyring(file=file, look_every_s=0)
    aside = tmp_path / "aside"
    aside.write_text(line("me", "read", "submit"))
    assert aside.stat().st_size == file.stat().st_size
    os.utime(aside, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    aside.replace(file)
    assert (name_of(keyring, "key of ci"), name_of(keyring, "key of me")) == (None, "me")


def test_the_file_is_checked_at_most_once_per_interval_except_for_a_new_key(file: Path) -> None:
    keyring = Keyring(file=file, look_every_s=3600)
    file.write_text(line("notebook", "read"))
    assert name_of(keyring, "key of ci") == "ci"
    assert name_of(keyring, "key of notebook") == "notebook"
    assert name_of(keyring, "key of ci") is None


@pytest.mark.parametrize("broken", ["ci sha256:no read\n", None, "directory"])
def test_a_broken_file_keeps_the_previous_keys_and_is_reported(
    broken: str | None, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyring, registry = Keyring(file=file, look_every_s=0), CollectorRegistry()
    keys_file_gauge(registry).set_function(keyring.is_file_broken)
    assert registry.get_sample_value("headrace_keys_file_broken") == 0
    file.unlink()
    if broken == "directory":
        file.mkdir()
    elif broken is not None:
        file.write_text(broken)
    for _ in range(3):
        assert name_of(keyring, "key of ci") == "ci"
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "The 1 keys that were read last stay in force" in said.getMessage(), "logged once, not at every request"
    assert str(file) in said.getMessage()
    assert registry.get_sample_value("headrace_keys_file_broken") == 1
    file.rmdir() if broken == "directory" else file.unlink(missing_ok=True)
    file.write_text(line("notebook", "read"))
    assert (name_of(keyring, "key of ci"), name_of(keyring, "key of notebook")) == (None, "notebook")
    assert registry.get_sample_value("headrace_keys_file_broken") == 0


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(file=file, look_every_s=0)

    def fail(_: Path) -> NoReturn:
        raise KeysFileError("api-keys cannot be read: Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("shared.access.keyring.read_keys_file", fail)
        file.write_text("")
        assert keyring.is_file_broken()
        assert name_of(keyring, "key of ci") == "ci"
    assert not keyring.is_file_broken()
    assert name_of(keyring, "key of ci") is None


def test_a_new_key_waits_while_another_thread_reads_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(file=file, look_every_s=0)
    is_reading, may_read = threading.Event(), threading.Event()

    def read_slowly(path: Path) -> tuple[NamedKey, ...]:
        is_reading.set()
        assert may_read.wait(120)
        return read_keys_file(path)

    monkeypatch.setattr("shared.access.keyring.read_keys_file", read_slowly)
    file.write_text(line("ci", "read") + line("new", "read"))
    metrics = threading.Thread(target=keyring.is_file_broken, daemon=True)
    metrics.start()
    assert is_reading.wait(120)
    threading.Timer(0.2, may_read.set).start()
    assert name_of(keyring, "key of new") == "new"
    metrics.join(120)


def test_wrong_keys_do_not_have_a_broken_file_read_at_each_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring(file=file, look_every_s=3600)
    file.write_text("ci read\n")
    read: list[Path] = []

    def count(path: Path) -> NoReturn:
        read.append(path)
        raise KeysFileError("api-keys, line 1: write NAME")

    monkeypatch.setattr("shared.access.keyring.read_keys_file", count)
    for number in range(10):
        assert name_of(keyring, f"wrong key {number}") is None
    assert read == [file]


def test_a_service_does_not_start_with_a_broken_file(file: Path) -> None:
    file.write_text("ci read\n")
    with pytest.raises(UserError, match=r"^HEADRACE_API_KEYS_FILE: .*api-keys, line 1: write NAME"):
        Keyring(api="the one", file=file)
    with pytest.raises(UserError, match="No such file"):
        Keyring(file=file.with_name("missing"))


def test_a_key_whose_time_is_over_is_known_and_opens_nothing(file: Path) -> None:
    file.write_text(line("ci", "read", expires="2020-01-01"))
    keyring = Keyring(file=file)
    key = keyring.find(b"key of ci", "read")
    assert key is not None
    assert key.has_expired()
    assert not keyring.allows(key, "read")


def test_nothing_that_shows_a_key_shows_its_hash(file: Path) -> None:
    key = Keyring(file=file).find(b"key of ci", "read")
    assert key is not None
    assert digest_of(b"key of ci").hex()[:12] not in repr(key)
    assert repr(digest_of(b"key of ci"))[2:20] not in repr(key)
