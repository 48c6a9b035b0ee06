"""Downloads a reward model from the Hugging Face hub into the local cache: the configs first, then the other files.

    config.json and the like --check_config--> weights and tokenizer --> a directory, named by its commit

Only data files are fetched: no pickle, no Python.
"""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.rewarder.reward_models.model_files import FILES_TO_FETCH
from shared.errors import UserError

_CONFIGS = ["config.json", "tokenizer_config.json", "adapter_config.json"]


def fetch_config(model_id: str, revision: str | None) -> Path:
    """Download a model's config files, and return their directory. The directory's name is the commit.

    Raises:
        UserError: The configs cannot be fetched. The message says why, and what to do.
    """
    return _fetch(model_id, revision, _CONFIGS)


def fetch_all(model_id: str, commit: str) -> Path:
    """Download all files of this commit that a model needs, and return their directory; raises UserError."""
    return _fetch(model_id, commit, list(FILES_TO_FETCH))


def _fetch(model_id: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
            )
        )
    except GatedRepoError as error:
        raise UserError(
            f"{model_id} is gated; accept its terms on the hub and give the rewarder a token in HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{model_id} has no revision '{revision}' on the hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{model_id} is not on the hub, or private; check the spelling, set HF_TOKEN if it is private, or give the "
            "absolute path of a directory"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{model_id} is not in the rewarder's cache of Hugging Face, and the hub cannot be reached (or "
            "HF_HUB_OFFLINE is set); give the absolute path of a directory, or let the rewarder reach the hub"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"{model_id} cannot be fetched from the hub ({type(error).__name__}: {why})") from error
