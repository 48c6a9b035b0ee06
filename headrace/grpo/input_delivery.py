"""Hands a script's files and modules to the services: in a shared directory, or over HTTP.

file, module --SharedFiles--> a file stays where it is; a module is written where the services look for modules
             --Uploads------> both are sent over HTTP (file_transfer.py)
"""

import os
import shutil
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from headrace.api_connection import HeadraceApiError
from headrace.grpo.argument_error import ArgumentError
from shared.files.disk_sync import write_whole
from shared.user_code.places import named_by_content

_UPLOADS_OFF = "/problems/uploads-off"
_REFUSALS = (
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)


class Delivery(Protocol):
    """Hands files and Python modules to the services, and returns the paths or names that the services know."""

    def existing(self, path: Path) -> str:
        """Return the path by which the services find a file or directory that the user named."""
        ...

    def written(self, path: Path) -> str:
        """Return the path by which the services find a file or directory that was written for them."""
        ...

    def module(self, name: str, source: str) -> str:
        """Return the name under which the services import a module.

        Args:
            name: Beginning of the module's name.
            source: The module's text.

        Raises:
            ArgumentError: The services do not accept modules.
        """
        ...


class SharedFiles(Delivery):
    """Delivery to services that see this machine's files: paths stay, and modules are written to a directory.

    Args:
        functions: Directory in which the rewarder and the sessions service look for modules.
    """

    def __init__(self, functions: Path) -> None:
        self._functions = functions

    def existing(self, path: Path) -> str:
        """Return the path unchanged, because the services read the same file."""
        return str(path)

    def written(self, path: Path) -> str:
        """Return the path unchanged, because the services read the same file."""
        return str(path)

    def module(self, name: str, source: str) -> str:
        """Write the module to the directory of functions, and return its name, which ends with a hash of its text."""
        module = named_by_content(name, source.encode())
        self._functions.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._functions / f"{module}.py"
        if not path.exists():
            write_whole(path, source.encode(), aside=f".{module}.{os.getpid()}")
        return module


class Sender(Protocol):
    """Sends inputs to services that do not see this machine's files."""

    def upload(self, path: Path) -> str:
        """Upload a file or directory, and return its path on the services' machines."""
        ...

    def upload_module(self, name: str, source: str) -> str:
        """Upload a Python module, and return the name by which the services import it."""
        ...


class Uploads(Delivery):
    """Delivery to services on other machines, to which files and modules are uploaded over HTTP."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def existing(self, path: Path) -> str:
        """Upload the file or directory, and return its path there; ``path`` itself if the services take no uploads."""
        try:
            return self._sender.upload(path)
        except HeadraceApiError as error:
            if error.problem.get("type") != _UPLOADS_OFF:
                raise
            return str(path)

    def written(self, path: Path) -> str:
        """Upload the file or directory, and return its path there. Here it is deleted, even if the upload fails."""
        try:
            return self._sender.upload(path)
        finally:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def module(self, name: str, source: str) -> str:
        """Upload the module, and return its name in the services. Raises ArgumentError if modules are not accepted."""
        try:
            return self._sender.upload_module(name, source)
        except HeadraceApiError as error:
            if error.status not in _REFUSALS:
                raise
            raise ArgumentError(
                f"{name} is a function of this script, and the services do not take it: {str(error).rstrip('.')}. "
                "Another way is HEADRACE_INPUTS_DIR, a directory that both sides see, whose functions/ is on "
                "HEADRACE_REWARD_PATH and HEADRACE_TOOL_PATH there"
            ) from None
