"""Checks at submit that the trainer has what a run needs. Otherwise its training rank would refuse the run later.

    nnodes              several machines need an address at which their ranks meet
    nproc_per_node      each rank needs its own GPU, if there are any
    push_to_hub         needs a token, or the trained model would not be uploaded

Tokens are looked for, but not tested.
"""

from collections.abc import Mapping
from pathlib import Path

from services.trainer.settings import TrainerSettings
from services.trainer.supervision.rank_command import rank_command
from shared.errors import UserError
from shared.gpus import num_gpus
from shared.run_options.run_config import RunConfig

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")


def check_surroundings(config: RunConfig, settings: TrainerSettings) -> list[tuple[str, str]]:
    """Return setting and sentence for each requirement that is missing where the training ranks run."""
    errors: list[tuple[str, str]] = []
    environment = settings.rank_environment()
    try:
        rank_command("", config, settings)
    except UserError as error:
        errors.append((error.field or "nnodes", str(error)))
    gpus = num_gpus(environment)
    if config.nproc_per_node != "auto" and 0 < gpus < config.nproc_per_node:
        errors.append(
            (
                "nproc_per_node",
                f"{config.nproc_per_node} training ranks need a GPU each, and the trainer has {gpus}; set "
                f"nproc_per_node to at most {gpus}, or to auto",
            )
        )
    if config.push_to_hub and not has_hub_token(environment):
        errors.append(
            (
                "push_to_hub",
                "the trainer has no token for the Hugging Face Hub, so the model could not be uploaded: set HF_TOKEN "
                "in its environment, or log in with `hf auth login` there, or leave push_to_hub out",
            )
        )
    return errors


def has_hub_token(environment: Mapping[str, str]) -> bool:
    """Whether huggingface_hub would find a token in this environment or in the file that `hf auth login` writes."""
    if any(environment.get(name, "").strip() for name in _TOKENS):
        return True
    home = Path(environment.get("HOME", "~")).expanduser()
    cache = environment.get("XDG_CACHE_HOME") or home / ".cache"
    directory = environment.get("HF_HOME") or Path(cache) / "huggingface"
    path = Path(environment.get("HF_TOKEN_PATH") or Path(directory) / "token").expanduser()
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False
