"""Uploads a script's model to the hub, with a model card, as ``Trainer.push_to_hub`` does.

model directory --complete the model card, upload all files--> repository --> a commit, or a future of it

The text of the card that the run wrote is kept. A model that was not trained yet gets a short card.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from headrace.grpo.argument_error import ArgumentError
from shared.run_options.grpo_config import DEFAULT_OUTPUT_DIR, GRPOConfig

_TAGS: Final = ("headrace", "grpo")
_NOT_UPLOADED: Final = ["_*", "checkpoint-*", "headrace-run.json"]


@dataclass(frozen=True)
class Card:
    """The caller's additions to the model card.

    Args:
        model_name: The model's name; the repository's if None.
        dataset_name: Id of the data set, or several ids.
        tags: One tag, or several.
    """

    model_name: str | None = None
    dataset_name: str | Sequence[str] | None = None
    tags: str | Sequence[str] | None = None


def repository_name(args: GRPOConfig) -> str:
    """Return the name of the hub's repository: ``hub_model_id``, or else the last part of ``output_dir``.

    Raises:
        ArgumentError: Neither is set.
    """
    is_chosen = args.output_dir != DEFAULT_OUTPUT_DIR or "output_dir" in args.given
    name = args.hub_model_id or (Path(args.output_dir or "").name if is_chosen else "")
    if not name:
        raise ArgumentError("push_to_hub needs a name: set hub_model_id, or output_dir, in GRPOConfig")
    return name


def upload(
    directory: Path,
    args: GRPOConfig,
    *,
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    card: Card,
) -> tuple[str, Any]:
    """Upload a model's directory, and return the repository's id, and the commit or a future of the commit.

    Args:
        directory: Directory of the model's files. README.md in it, the model card, is completed or made.
        args: Options: ``hub_model_id``, ``hub_token``, ``hub_private_repo``, ``hub_revision``.
        commit_message: Message of the commit; None for the client's own.
        blocking: False returns a future at once, and uploads in the background.
        token: A token instead of ``hub_token``. Without both, the token of `hf auth login` is used.
        revision: Branch to upload to instead of ``hub_revision``. It is made if the repository does not have it.
        card: Additions to the model card.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token or args.hub_token)
    repository = api.create_repo(repository_name(args), private=args.hub_private_repo, exist_ok=True).repo_id
    branch = revision or args.hub_revision
    if branch is not None:
        api.create_branch(repository, branch=branch, exist_ok=True)
    complete_card(directory / "README.md", card, repository=repository)
    done: Any = cast("Any", api).upload_folder(
        repo_id=repository,
        folder_path=directory,
        commit_message=commit_message,
        revision=branch,
        run_as_future=not blocking,
        ignore_patterns=_NOT_UPLOADED,
    )
    return repository, done


def complete_card(file: Path, card: Card, *, repository: str) -> None:
    """Write name, data sets and tags of the model into a model card, which is made if ``file`` does not exist."""
    import huggingface_hub

    hub: Any = huggingface_hub
    name = card.model_name or repository.rpartition("/")[2]
    if not file.exists():
        file.write_text(f"# {name}\n\nTrained with GRPO by headrace.\n", encoding="utf-8")
    about: dict[str, Any] = hub.metadata_load(file) or {}
    about["model_name"] = name
    about.setdefault("library_name", "transformers")
    about["tags"] = _added(about.get("tags"), [*_TAGS, *_listed(card.tags)])
    if names := _added(about.get("datasets"), _listed(card.dataset_name)):
        about["datasets"] = names
    hub.metadata_save(file, about)


def _listed(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else [*value]


def _added(there: str | Sequence[str] | None, more: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*_listed(there), *more]))
