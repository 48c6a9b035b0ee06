"""`headrace keys`: adds, lists and revokes named API keys in the file that the services read.

The file is the first of these that is given:

--file                           any file, such as a file that a stack mounts
--state-dir                      the file of the services that `headrace up` runs there
HEADRACE_API_KEYS_FILE           the file that services on this machine read
HEADRACE_STATE_DIR, ./.headrace  as --state-dir

Services notice a changed file by themselves. A key is shown once, on stdout, and only its hash is kept.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from headrace import terminal
from headrace.local.state_dir import StateDir, choose_state_dir
from shared.access.keyring import VARIABLE
from shared.access.named_keys import (
    HEADER,
    KeysFileError,
    NamedKey,
    checked_name,
    digest_of,
    name_on,
    parse_expiry,
    parse_scopes,
    read_keys_file,
)
from shared.errors import UserError

_KEY_BYTES = 24
_NEW_FILE_MODE = 0o600


def add(arguments: argparse.Namespace) -> int:
    """Make a named API key, put its hash into the keys file, and print the key."""
    with _told_in_words():
        shown = secrets.token_urlsafe(_KEY_BYTES)
        key = NamedKey(
            name=checked_name(arguments.name),
            digest=digest_of(shown.encode()),
            scopes=frozenset(parse_scopes(arguments.scopes)),
            expires_at=parse_expiry(arguments.expires) if arguments.expires else None,
        )
        path = keys_file(arguments)
        if key.has_expired():
            raise UserError(f"--expires {arguments.expires}: that time has passed")
        with _editing(path) as lines:
            if any(name_on(line) == key.name for line in lines):
                raise UserError(f"{path} already has a key {key.name}: revoke it first, or choose another name")
            lines.append(key.line())
    sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()
    terminal.note(f"this is the key {key.name}, shown only now. Services that read {path} accept it at once")
    return 0


def revoke(arguments: argparse.Namespace) -> int:
    """Remove the key with the given name from the keys file, so that the services refuse it."""
    with _told_in_words():
        path = keys_file(arguments)
        with _editing(path) as lines:
            left = [line for line in lines if name_on(line) != arguments.name]
            if len(left) == len(lines):
                raise UserError(
                    f"{path} has no key {terminal.printable(arguments.name)}; `headrace keys list` shows all"
                )
            lines[:] = left
    terminal.note(f"{arguments.name} is refused from now on, and streams opened with it end within two seconds")
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    """Print the name, scopes and expiry of each key in the keys file. The file has only the keys' hashes."""
    with _told_in_words():
        path = keys_file(arguments)
        keys = read_keys_file(path) if path.exists() else ()
    if not keys:
        terminal.note(f"{path} has no named keys: `headrace keys add NAME --scopes read,submit` makes one")
        return 0
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "scopes", "ends"):
        view.add_column(column, overflow="fold")
    for key in keys:
        view.add_row(key.name, key.scope_list(), _end_of(key))
    terminal.console().print(view)
    return 0


def keys_file(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the keys file that the arguments or the environment choose.

    Raises:
        UserError: No file is named, and `headrace up` was never started with this state directory.
    """
    if arguments.file:
        return Path(os.path.expanduser(arguments.file)).absolute()
    if not arguments.state_dir and (named := environment.get(VARIABLE)):
        return Path(named).absolute()
    state = StateDir(choose_state_dir(arguments.state_dir))
    if not state.api_keys_file.parent.is_dir():
        raise UserError(
            f"`headrace up` was never started on {state.path}: start it, or name the keys file of another deployment "
            f"with --file or in {VARIABLE}"
        )
    return state.api_keys_file


@contextlib.contextmanager
def _editing(path: Path) -> Generator[list[str]]:
    """Yield the lines of a keys file for editing, then replace the file in one step.

    A lock keeps other `headrace keys` commands out. The file and its directory are synced to disk: if a power loss
    undid the edit, a revoked key would be valid again.

    Raises:
        KeysFileError: The file is not a valid keys file, before or after the edit.
        OSError: The file cannot be read or written.
    """
    path = path.resolve()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        is_there = path.exists()
        if is_there:
            read_keys_file(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines() if is_there else [HEADER]
        yield lines
        before = path.stat() if is_there else None
        mode = before.st_mode & 0o777 if before is not None else _NEW_FILE_MODE
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                if before is not None:
                    _keep_owner(file.fileno(), before, path)
                os.fchmod(file.fileno(), mode)
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            read_keys_file(aside)
            aside.replace(path)
            os.fsync(directory)
        finally:
            aside.unlink(missing_ok=True)
    finally:
        os.close(directory)


def _keep_owner(descriptor: int, before: os.stat_result, path: Path) -> None:
    """Give a new file the user and the group of the file that it replaces, or services could no longer read it."""
    now = os.fstat(descriptor)
    if (now.st_uid, now.st_gid) == (before.st_uid, before.st_gid):
        return
    try:
        os.fchown(descriptor, before.st_uid, before.st_gid)
    except OSError as error:
        if before.st_mode & stat.S_IROTH:  # services can read it whosever it is
            return
        raise UserError(
            f"{path} belongs to user {before.st_uid} and group {before.st_gid}, which a new file of yours cannot be "
            "given: run the command as that user or as root. Nothing was changed"
        ) from error


@contextlib.contextmanager
def _told_in_words() -> Generator[None]:
    try:
        yield
    except KeysFileError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename or 'the keys file'} cannot be used: {error.strerror}") from error


def _end_of(key: NamedKey) -> Text:
    if key.expires_at is None:
        return Text("-")
    at = f"{key.expires_at:%Y-%m-%d %H:%M %Z}"
    return Text(f"{at}, expired", style="red") if key.has_expired() else Text(at)
