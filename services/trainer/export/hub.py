"""Uploads a model directory to the Hugging Face Hub, with the token of HF_TOKEN or of ``hf auth login``.

    create_repo --> owner/name, as the hub knows it --> upload_folder --> URL of the repository

Every failure is a HubError with one sentence, so that a failed upload does not fail a run that has trained its model.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from shared.errors import HeadraceError

_ResultT = TypeVar("_ResultT")

_OF_EARLIER_MODELS = [
    *("adapter_config.json", "adapter_model.*", "config.json", "model.safetensors*", "model-*-of-*.safetensors"),
    *("chat_template.*", "additional_chat_templates/*"),
]
"""Patterns of files in a repository that loaders would read instead of, or besides, the files that are uploaded."""


class HubError(HeadraceError):
    """The hub could not be reached, or refused a request. The local model is unchanged."""


def open_repository(repo_id: str, *, is_private: bool) -> str:
    """Return the full id of a model repository. Creates it if it does not exist.

    Args:
        repo_id: ``owner/name``, or a name in the namespace of the token's owner.
        is_private: Whether a new repository is private. An existing one is not changed.

    Raises:
        HubError: The token is missing, or the hub refused.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError(
            "no token for the Hugging Face Hub was found: set HF_TOKEN for the trainer, or run `hf auth login`"
        )
    created: Any = _asking(lambda: HfApi().create_repo(repo_id, private=is_private or None, exist_ok=True))
    return str(created.repo_id)


def upload(directory: Path, repo_id: str, *, message: str) -> str:
    """Upload all files of a directory, and return the repository's URL. Weights of earlier models are removed.

    Args:
        directory: Directory of the model.
        repo_id: The id that `open_repository` returned.
        message: Commit message.

    Raises:
        HubError: Some or all files could not be uploaded.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    _asking(
        lambda: api.upload_folder(
            repo_id=repo_id, folder_path=directory, commit_message=message, delete_patterns=_OF_EARLIER_MODELS
        )
    )
    return f"{api.endpoint}/{repo_id}"


def by_hand(directory: Path, repo_id: str, *, is_private: bool) -> str:
    """Return the shell command with which a user can upload the directory."""
    private = ["--private"] if is_private else []
    removed = [f"--delete={pattern}" for pattern in _OF_EARLIER_MODELS]
    return shlex.join(["hf", "upload", repo_id, str(directory), ".", *private, *removed])


def _asking(work: Callable[[], _ResultT]) -> _ResultT:
    import huggingface_hub.errors

    not_sent: type[Exception] = cast(Any, huggingface_hub.errors).HTTPError  # of the httpx version that it is built on
    try:
        return work()
    # Errors of huggingface_hub and hf_xet: OSError for the hub's answers and for files, httpx's for failed requests,
    # ValueError for an invalid repository id, and RuntimeError for a file that failed in a thread.
    except (OSError, ValueError, RuntimeError, not_sent) as error:
        said = [str(error) or type(error).__name__]
        if error.__cause__ is not None:
            said.append(str(error.__cause__))  # for a failed file: the error has its name, the cause has the reason
        raise HubError(" ".join(" ".join(said).split())) from error
