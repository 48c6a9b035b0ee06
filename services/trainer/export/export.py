"""Exports a checkpoint as a directory that transformers and vLLM load: unsharded weights, tokenizer and model card.

    step_00000010/model/shard-*  --assembled, in the run's dtype-->  DIR/model.safetensors
    step_00000010/model/*.json                                   -->  DIR/config.json, tokenizer
    the run's config.json, metrics.jsonl                         -->  DIR/README.md (model_card.py)

A LoRA run is exported as its adapters, or as the base model with the adapters merged (adapter_export.py).

An export needs no GPU and no other rank, even if the run used several. Shards are read one after another, so that
memory for one copy of the weights suffices. The directory is either complete or absent.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from services.trainer.beginning.source import read_table
from services.trainer.checkpoints.best_checkpoint import best_in_files
from services.trainer.checkpoints.checkpoint import STATE_FILE
from services.trainer.checkpoints.manifest import find_damage, has_all_files, sync_tree
from services.trainer.checkpoints.shards import read_shards, saved_dtypes, saved_shapes
from services.trainer.export.adapter_export import export_adapters, export_merged, holds_adapters
from services.trainer.export.model_card import FILE_NAME, RunFacts, model_card
from services.trainer.policy.lora import CONFIG_FILE
from services.trainer.policy.policy_model import dtype_of, exact_weights, save_tensors
from services.trainer.run_outputs import read_metrics
from shared.beginning import BEGINNING_FILE, Beginning
from shared.errors import HeadraceError, UserError
from shared.files.disk_sync import sync

log = logging.getLogger(__name__)

MODEL = "model"
_OF_A_MODEL = re.compile(
    r".*\.(safetensors|model|jinja|tiktoken)|.*\.(safetensors|bin)\.index\.json|pytorch_model.*\.bin"
    r"|(\w+_)?config\.json|(added_tokens|chat_template|merges|special_tokens_map|tekken|tokenizer|vocab)\.(json|txt)"
    r"|README\.md|LICENSE.*|\.gitattributes"
)
"""Names of the files of a model, its tokenizer and its card."""
_TEMPLATES = "additional_chat_templates"
"""The directory with the chat templates of a tokenizer besides its default one."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_checkpoint(
    checkpoint: Path, to: Path, *, dtype: str | None = None, title: str | None = None, merge: bool = False
) -> Path:
    """Write a checkpoint's model to ``to``, and return ``to``. An existing directory is replaced.

    Args:
        checkpoint: The checkpoint's directory. The caller checks it for damage.
        to: Directory to create.
        dtype: ``float32`` or ``bfloat16``; the run's dtype by default.
        title: Name of the model on its card; the directory's name by default.
        merge: Whether to merge a LoRA run's adapters into the weights of their base.

    Raises:
        HeadraceError: The checkpoint contains no model that can be exported, or was deleted; the message says why.
        OSError: The directory could not be written.
    """
    facts = run_facts(checkpoint)
    source = checkpoint / MODEL
    is_adapter = holds_adapters(source)
    if merge:
        _check_mergeable(facts, is_adapter=is_adapter)
    if not is_adapter and not (source / "config.json").is_file():
        raise HeadraceError(f"{checkpoint} contains no model: {source / 'config.json'} is missing")
    aside = to.with_name(f".{to.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write = (export_merged if merge else export_adapters) if is_adapter else _write_model
        write(source, aside, dtype=_DTYPES[dtype or str(facts.config.get("dtype", "float32"))])
        _copy_the_rest(source, aside)
        card = model_card(facts, title=title or to.name, is_adapter=is_adapter and not merge)
        (aside / FILE_NAME).write_text(card, encoding="utf-8")
        _give_all_the_mode_of(aside / FILE_NAME)
        _require_all_files(checkpoint)
        _put_in_place(aside, to)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return to


def check_exportable(checkpoint: Path, to: Path, *, is_verified: bool = False) -> None:
    """Refuse an export from a damaged checkpoint, or to a directory with other files than a model.

    With ``is_verified``, the checkpoint is not compared with its checksums again.

    Raises:
        UserError: ``checkpoint`` is not a checkpoint or is damaged, or ``to`` is the current directory or contains
            anything but an exported model.
    """
    if not checkpoint.is_dir():
        raise UserError(f"{checkpoint} is not a directory; give one like RUN_DIR/checkpoints/step_00000010")
    if not is_verified and (damage := find_damage(checkpoint)) is not None:
        raise UserError(f"{checkpoint} cannot be exported: {damage}. Use an older checkpoint")
    if not to.exists():
        return
    if not to.is_dir():
        raise UserError(f"{to} would be replaced, but is not a directory; give another one")
    if strange := _strange_file(to, written=checkpoint / MODEL):
        raise UserError(
            f"{to} would be replaced, but contains other files than a model, such as {strange}; give another directory"
        )
    if to.samefile(Path.cwd()):
        raise UserError(f"{to} would be replaced, but is the current directory; give another one")


def _strange_file(directory: Path, *, written: Path) -> str:
    """Return the name of something in a directory that does not belong to a model; "" if there is only a model.

    What lies in ``written``, from which an export copies, belongs to a model.
    """
    there = sorted(directory.iterdir())
    for path in there:
        if (written / path.name).is_file() and path.is_file():
            continue
        if path.name == _TEMPLATES and path.is_dir() and not path.is_symlink():
            if strange := [it.name for it in path.iterdir() if it.is_dir() or it.suffix != ".jinja"]:
                return f"{_TEMPLATES}/{strange[0]}"
        elif path.is_dir() or not _OF_A_MODEL.fullmatch(path.name):
            return path.name
    is_model = holds_adapters(directory) or "model_type" in read_table(directory / "config.json")
    return "" if is_model or not there else there[0].name


def _require_all_files(checkpoint: Path) -> None:
    if not has_all_files(checkpoint):
        raise HeadraceError(f"{checkpoint} was deleted while it was exported: export a newer one")


def run_facts(checkpoint: Path) -> RunFacts:
    """Return the facts for the model card. A checkpoint outside of its run's directory only gives the step."""
    run_dir = checkpoint.absolute().parent.parent
    step = int(json.loads((checkpoint / STATE_FILE).read_text())["step"])
    config_file = run_dir / "config.json"
    if not config_file.is_file() or checkpoint.parent.name != "checkpoints":
        return RunFacts(step=step)
    try:
        config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the model is exported without its options
        log.warning("the model card has no options: %s is damaged: %s", config_file, error)
        return RunFacts(step=step, is_config_damaged=True)
    # Metrics that are logged once per batch are in the line of the batch's first step.
    steps = int(config.get("num_iterations", 1)) * int(config.get("steps_per_generation", 1))
    lines, _ = read_metrics(run_dir, after_step=step - steps, limit=steps)
    lines = [line for line in lines if int(line["step"]) <= step]
    is_logged = bool(lines) and int(lines[-1]["step"]) == step
    metrics = {name: value for line in lines for name, value in line.items()} if is_logged else {}
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return RunFacts(
        config=config,
        metrics=numbers,
        run_id=run_dir.name,
        step=step,
        began_from=_began_from(run_dir / BEGINNING_FILE),
        best=_best(run_dir, config, step),
    )


def _began_from(file: Path) -> str | None:
    """Return a phrase for the checkpoint that the run began from, or None. Only a local path's last part is shown."""
    try:
        beginning = msgspec.json.decode(file.read_bytes(), type=Beginning)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    said = beginning.said if beginning.run_id is not None else f"`{Path(beginning.said).name}` (a local path)"
    return msgspec.structs.replace(beginning, said=said).in_words()


def _best(run_dir: Path, config: dict[str, Any], step: int) -> str:
    """Return the deciding metric and its value if the checkpoint of ``step`` is the run's best; otherwise ""."""
    best = best_in_files(run_dir, config)
    return f"`{best.rule.metric}`: {best.value:.6g}" if best is not None and best.step == step else ""


def _write_model(source: Path, directory: Path, *, dtype: torch.dtype) -> None:
    """Write config and weights with the tensor names and file sizes of ``save_pretrained``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = cast(Any, AutoConfig).from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        policy: Any = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype, trust_remote_code=False)
    dtypes, exact = saved_dtypes(source), exact_weights(policy)
    tensors: dict[str, Tensor] = {
        name: torch.empty(shape, dtype=dtype_of(name, dtypes[name], run=dtype, exact=exact))
        for name, shape in saved_shapes(source).items()
    }
    read_shards(source, tensors)
    save_tensors(policy, tensors, directory)


def _give_all_the_mode_of(written: Path) -> None:
    """Give all files in the directory of ``written`` its mode. safetensors lets only the owner read."""
    mode = written.stat().st_mode & 0o777
    for path in written.parent.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _put_in_place(directory: Path, to: Path) -> None:
    """Rename a complete directory to ``to``. An existing one is removed once the new one is synced to the disk."""
    sync_tree(directory)
    replaced = to.with_name(f".{to.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if to.exists():
        to.rename(replaced)
    directory.rename(to)
    sync(to.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _copy_the_rest(source: Path, directory: Path) -> None:
    """Copy everything but weights and their configs: tokenizer, chat templates, generation config."""
    for path in source.iterdir():
        is_written = path.name in ("config.json", CONFIG_FILE) or path.name.startswith(("shard-", "model."))
        if path.is_file() and not is_written:
            shutil.copy2(path, directory / path.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, directory / _TEMPLATES)


def _check_mergeable(facts: RunFacts, *, is_adapter: bool) -> None:
    if not is_adapter:
        raise UserError("the run of this checkpoint trained all weights, so it has no adapters to merge")
    if facts.is_config_damaged:
        raise UserError(
            "the run's config.json is damaged, so it is not known whether the adapters were trained with a base in 4 "
            "bits; export them without --merge"
        )
    if facts.config.get("load_in_4bit"):
        raise UserError(
            "the adapters were trained with a base in 4 bits, and cannot be merged into another; export them without "
            "--merge, and load them with PEFT onto the base in 4 bits"
        )
