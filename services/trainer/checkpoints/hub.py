"""Uploads a model directory to the Hugging Face Hub, with the token of HF_TOKEN or of ``hf auth login``.

    create_repo --> owner/name, as the hub knows it --> upload_folder --> its address

Whatever goes wrong there is one kind of error with a sentence: a run that has trained its model does not end for this.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from shared.errors import HeadraceError

_ResultT = TypeVar("_ResultT")


class HubError(HeadraceError):
    """The hub could not be reached, or refused. The model is where it was."""


def open_repository(repo_id: str, *, is_private: bool) -> str:
    """Return the full id of a model repository, which is made if it is not there.

    Args:
        repo_id: ``owner/name``, or a name that will be the token's owner's.
        is_private: Whether one that is made is private; one that is there stays as it is.

    Raises:
        HubError: There is no token, or the hub refused.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError(
            "there is no token of the Hugging Face Hub: set HF_TOKEN for the trainer, or run `hf auth login`"
        )
    created: Any = _asking(lambda: HfApi().create_repo(repo_id, private=is_private or None, exist_ok=True))
    return str(created.repo_id)


def upload(directory: Path, repo_id: str, *, message: str) -> str:
    """Upload all files of a directory, and return the repository's address.

    Args:
        directory: Of the model.
        repo_id: What `open_repository` returned.
        message: Of the commit.

    Raises:
        HubError: It could not be uploaded, or not all of it.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    _asking(lambda: api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message=message))
    return f"{api.endpoint}/{repo_id}"


def by_hand(directory: Path, repo_id: str, *, is_private: bool) -> str:
    """Return the command that uploads the directory."""
    private = ["--private"] if is_private else []
    return shlex.join(["hf", "upload", repo_id, str(directory), ".", *private])


def _asking(work: Callable[[], _ResultT]) -> _ResultT:
    import huggingface_hub.errors

    not_sent: type[Exception] = cast(Any, huggingface_hub.errors).HTTPError  # of whichever httpx it is built on
    try:
        return work()
    # What huggingface_hub and hf_xet raise: answers of the hub and files are OSErrors, what cannot be sent is httpx's,
    # a repository id that cannot be a ValueError, and a file that failed in one of its threads a RuntimeError.
    except (OSError, ValueError, RuntimeError, not_sent) as error:
        said = [str(error) or type(error).__name__]
        if error.__cause__ is not None:
            said.append(str(error.__cause__))  # of a file that failed, the one has the name and the other the reason
        raise HubError(" ".join(" ".join(said).split())) from error
