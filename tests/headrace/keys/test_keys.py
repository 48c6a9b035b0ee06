"""`headrace keys`: keys are added, listed and revoked in a file that services accept."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli import command_line as cli
from headrace.local.state_dir import StateDir
from shared.access.keyring import Keyring

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, with no environment variable that names a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_API_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "api-keys"


def add(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> str:
    """Return the printed key."""
    assert cli.main(["keys", "add", name, *more]) == 0
    return capsys.readouterr().out.strip()


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message of a refused command."""
    assert cli.main(["keys", *arguments]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_key_that_is_added_opens_what_it_is_for_until_it_is_revoked(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("# of the team\n")
    keyring = Keyring(file=file, look_every_s=0)
    shown = add(capsys, "ci", "--scopes", "read,submit", "--file", str(file))
    assert len(shown) == 32
    key = keyring.find(shown.encode(), "read")
    assert key is not None
    assert (key.name, set(key.scopes), key.expires_at) == ("ci", {"read", "submit"}, None)
    assert shown not in file.read_text(), "only its hash is kept"
    another = add(capsys, "notebook", "--scopes", "infer", "--expires", "2999-01-01", "--file", str(file))

    assert cli.main(["keys", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert [line.split() for line in listed.splitlines() if line.strip().startswith(("ci", "notebook"))] == [
        ["ci", "read,submit", "-"],
        ["notebook", "infer", "2999-01-01", "00:00", "UTC"],
    ]

    assert cli.main(["keys", "revoke", "ci", "--file", str(file)]) == 0
    assert keyring.find(shown.encode(), "read") is None
    assert keyring.find(another.encode(), "read") is not None
    assert file.read_text().startswith("# of the team\n"), "the other lines stay"


def test_a_file_is_created_only_for_its_owner_and_keeps_a_changed_mode(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, "ci", "--scopes", "read", "--file", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o444)  # as a container reads it
    add(capsys, "me", "--scopes", "read", "--file", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert [path.name for path in file.parent.iterdir()] == ["api-keys"], "no temporary file is left"


def test_an_edited_file_keeps_its_owner_and_its_group(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(capsys, "ci", "--scopes", "read", "--file", str(file))
    if os.getuid() == 0:
        user, group = 12345, 12346
    else:
        user, group = os.getuid(), next((group for group in os.getgroups() if group != file.stat().st_gid), -1)
        if group == -1:
            pytest.skip("this user has only one group")
    os.chown(file, user, group)
    assert cli.main(["keys", "revoke", "ci", "--file", str(file)]) == 0
    assert (file.stat().st_uid, file.stat().st_gid) == (user, group)


def test_a_file_that_cannot_keep_its_owner_is_not_changed(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = add(capsys, "ci", "--scopes", "read", "--file", str(file))
    before = file.read_text()

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refused)
    fstat = os.fstat

    def of_another(descriptor: int) -> SimpleNamespace:
        return SimpleNamespace(st_uid=-5, st_gid=fstat(descriptor).st_gid)

    monkeypatch.setattr(os, "fstat", of_another)
    assert "run the command as that user or as root. Nothing was changed" in said(
        capsys, "revoke", "ci", "--file", str(file)
    )
    monkeypatch.undo()
    assert file.read_text() == before
    assert Keyring(file=file).find(shown.encode(), "read") is not None


def test_a_key_on_the_first_line_after_a_byte_order_mark_is_revoked(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = add(capsys, "ci", "--scopes", "read", "--file", str(file))
    (key,) = [line for line in file.read_text().splitlines() if line.startswith("ci")]
    file.write_text(f"{key}\n", encoding="utf-8-sig")
    assert cli.main(["keys", "revoke", "ci", "--file", str(file)]) == 0
    assert Keyring(file=file).find(shown.encode(), "read") is None


def test_an_edit_is_on_the_disk_before_and_after_it_takes_the_place_of_the_file(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(capsys, "ci", "--scopes", "read", "--file", str(file))
    inode = file.stat().st_ino
    synced: list[tuple[bool, bool]] = []

    def fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_directory, file.stat().st_ino != inode))

    monkeypatch.setattr(os, "fsync", fsync)
    assert cli.main(["keys", "revoke", "ci", "--file", str(file)]) == 0
    assert synced == [(False, False), (True, True)], "the file is synced before it is renamed"


def test_headrace_up_has_its_own_keys_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"was never started on {tmp_path}/.headrace" in said(capsys, "list")
    state = StateDir(tmp_path / ".headrace")
    state.make()
    shown = add(capsys, "ci", "--scopes", "read")
    state.make()
    assert Keyring(file=state.api_keys_file).find(shown.encode(), "read") is not None, "the key is created once"


def test_the_file_that_the_environment_names_counts_unless_an_option_names_another(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEYS_FILE", str(file))
    StateDir(tmp_path / "state").make()
    add(capsys, "of-environment", "--scopes", "read")
    add(capsys, "of-state", "--scopes", "read", "--state-dir", "state")
    assert "of-environment" in file.read_text()
    assert "of-state" in StateDir(tmp_path / "state").api_keys_file.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["add", "ci", "--scopes", "read"], "has a key ci: revoke it first, or choose another name"),
        (
            ["add", "x", "--scopes", "write"],
            "'write' is not a scope; scopes are read, infer, score, submit, upload, code, operate",
        ),
        (["add", "a b", "--scopes", "read"], "a name has 1 to 64 letters"),
        (["add", "api-key", "--scopes", "read"], "api-key is reserved"),
        (["add", "x", "--scopes", "read", "--expires", "soon"], "write the time when a key ends as 2027-01-31"),
        (["add", "x", "--scopes", "read", "--expires", "2020-01-01"], "that time has passed"),
        (["revoke", "nobodys"], "has no key nobodys; `headrace keys list` shows all"),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(
    arguments: list[str], sentence: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(capsys, "ci", "--scopes", "read", "--file", str(file))
    before = file.read_bytes()
    assert sentence in said(capsys, *arguments, "--file", str(file))
    assert file.read_bytes() == before


def test_a_file_that_is_broken_is_not_edited_and_its_line_is_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("# keys\nci read\n")
    for arguments in (["add", "x", "--scopes", "read"], ["revoke", "ci"], ["list"]):
        assert f"{file}, line 2: write NAME sha256:HEX SCOPES" in said(capsys, *arguments, "--file", str(file))
    assert file.read_text() == "# keys\nci read\n"
    assert "cannot be used: No such file" in said(capsys, "add", "x", "--scopes", "read", "--file", "no/where")


def test_two_edits_of_a_file_at_once_lose_nothing(file: Path) -> None:
    commands = [
        [sys.executable, "-m", "headrace", "keys", "add", f"k{number}", "--scopes", "read", "--file", str(file)]
        for number in range(6)
    ]
    adding = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    keys = [process.communicate(timeout=120)[0].strip() for process in adding]
    assert [process.returncode for process in adding] == [0] * 6
    keyring = Keyring(file=file)
    assert all(keyring.find(key.encode(), "read") for key in keys)
