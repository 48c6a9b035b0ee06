"""Checks that a run can begin from a checkpoint, without torch and without reading tensor data.

    model       the source's weights have the shape of the run's model; adapters have the run's LoRA rank and scale
    optimizer   the checkpoint has the state of the run's optimizer (optimizer_fit.py)
    data        continue at the checkpoint's position if both runs read the same rows in the same order

These checks find the common mistakes at submit, before the run is queued. Shapes are compared only if ``model`` is a
directory on this machine. The training rank compares every tensor when it loads the weights.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec

from services.trainer.beginning.optimizer_fit import optimizer_misfit
from services.trainer.beginning.source import ADAPTER_CONFIG, FIELD, MODEL_CONFIG, FoundSource, read_table
from services.trainer.checkpoints.tensor_headers import damaged_tensor_file, linear_layers, tensor_headers
from services.trainer.groups.ledger import Ledger
from shared.beginning import Beginning, RowCursor
from shared.errors import HeadraceError, UserError
from shared.run_options.run_config import RunConfig
from shared.run_options.section import LARGEST

_CORE_STATE, _REFERENCE = "core_state.json", "reference"
_SHAPE: Final = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts"),
)
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_ROWS: Final = ("dataset_name", "dataset_config", "dataset_train_split", "datasets")
_ROW_ORDER: Final = (*_ROWS, "dataset_streaming", "shuffle_dataset", "shuffle_buffer_size", "seed")
_LENGTH: Final = (
    *("max_steps", "num_train_epochs", "groups_per_step", "steps_per_generation", "num_iterations", *_ROWS),
)
"""Settings that give the number of steps of a run without ``max_steps``."""
_BLOCKS: Final = re.compile(r"(.+?)\.(\d+)\.")
"""The list of a layer's block: model.layers in model.layers.0.mlp.up_proj."""
_ROUTERS: Final = ("gate", "router")
"""Matrices that are linear layers only in some architectures."""
_MAX_ADMITTED = 2_000_000
"""Prompt groups of a run whose ledger is read here, in the memory of the run API."""
_MAX_LEFT = 100_000
"""Rows that a run may leave to the next one, whose record has them. Many more than are ever in flight."""
_ONLY_WEIGHTS = "; or set resume_only_model: true to take only the weights"


class _Schedule(msgspec.Struct):
    last_epoch: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    base_lrs: list[float]
    last_lr: Annotated[list[float], msgspec.Meta(min_length=1)] = msgspec.field(name="_last_lr")


class _CoreState(msgspec.Struct):
    """The fields of a checkpoint's core_state.json that the training rank requires."""

    schedule: _Schedule
    adam_steps: dict[str, float | None]
    entropy: dict[str, Any]


def beginning_of(config: RunConfig, found: FoundSource) -> tuple[Beginning, list[str]]:
    """Check that the run can begin from the source, and return its `Beginning` with notes for the user.

    Blocks on the disk.

    Raises:
        UserError: The run cannot begin from the source; ``problems`` has a sentence for each reason.
    """
    assert config.resume_from_checkpoint is not None
    notes = list(found.notes)
    weights_only = config.resume_only_model
    if found.source != "checkpoint" and not weights_only:
        weights_only = True
        notes.append(
            f"{found.directory} has only weights: this run takes them, and begins optimizer, schedule and data anew"
        )
    schedule = None if weights_only else _schedule_of(found)
    steps_before = 0 if schedule is None else schedule.last_epoch
    reasons = [*_weights_misfit(config, found)]
    if not weights_only:
        misfits = [
            *optimizer_misfit(config, found.directory, theirs=found.config, steps_before=steps_before),
            *_reference_misfit(config, found.directory),
        ]
        reasons += [f"{misfit}{_ONLY_WEIGHTS}" for misfit in misfits]
    if reasons:
        summary = "; ".join(reasons)
        raise UserError(summary, field=FIELD, problems=[(FIELD, reason) for reason in reasons])
    rows = RowCursor()
    if not weights_only:
        rows, row_notes = _rows_left(config, found)
        notes += row_notes
    if schedule is not None and config.lr_schedule().depends_on_length and _has_another_length(config, found.config):
        notes.append(
            f"the learning rate, which was {schedule.last_lr[0]:.3g}, may jump: lr_scheduler_type "
            f"{config.lr_scheduler_type} goes on as if a run of the new length had made the {steps_before} steps before"
        )
    beginning = Beginning(
        source=found.source,
        directory=str(found.directory),
        said=config.resume_from_checkpoint,
        weights_only=weights_only,
        run_id=found.run_id,
        run_name=found.run_name,
        step=None if found.state is None else found.state.step,
        steps_before=steps_before,
        rows=rows,
    )
    return beginning, notes


def _weights_misfit(config: RunConfig, found: FoundSource) -> Iterator[str]:
    if found.source != "checkpoint" and (cut := damaged_tensor_file(found.directory)) is not None:
        yield f"{cut} is damaged: its header cannot be read, or its size is not the one in it; copy it again"
        return
    has_adapters = (found.weights / ADAPTER_CONFIG).is_file()
    if has_adapters and not config.use_peft:
        yield f"{found.directory} has LoRA adapters, but this run trains all weights: set use_peft and its options"
        return
    if config.use_peft and not has_adapters:
        yield (
            f"{found.directory} has the weights of a whole model, but this run trains adapters (use_peft): to put them "
            "on these weights, export the checkpoint and give its directory as model"
        )
        return
    if has_adapters:
        theirs_in_4bit = found.config.get("load_in_4bit", config.load_in_4bit)
        if theirs_in_4bit != config.load_in_4bit:
            yield (
                f"the adapters in {found.directory} were trained on a base with load_in_4bit: "
                f"{json.dumps(theirs_in_4bit)}, and this run has {json.dumps(config.load_in_4bit)}; set it to theirs"
            )
        yield from _adapter_misfit(config, read_table(found.weights / ADAPTER_CONFIG), found.directory)
        if config.lora_target_modules is None and config.model.startswith("/"):
            yield from _layers_misfit(config, found)
    else:
        yield from _shape_misfit(config, read_table(found.weights / MODEL_CONFIG), found.directory)
    strange = sorted(
        {str(about.get("dtype")) for about in tensor_headers(found.weights).values()} - _FLOATS,
    )
    if strange:
        yield f"{found.directory} has weights of dtype {', '.join(strange)}; only floating-point weights are loaded"


def _shape_misfit(config: RunConfig, saved: Mapping[str, Any], directory: Path) -> Iterator[str]:
    own = read_table(Path(config.model) / MODEL_CONFIG) if config.model.startswith("/") else {}
    different = [
        f"{name} is {saved[name]} there and {own[name]} in {config.model}"
        for name in _SHAPE
        if name in saved and name in own and saved[name] != own[name]
    ]
    if different:
        listed = ", ".join(different)
        yield f"{directory} has the weights of another model: {listed}. Set model to the one it was made of"


def _adapter_misfit(config: RunConfig, saved: Mapping[str, Any], directory: Path) -> Iterator[str]:
    pairs = {
        "lora_r": ("r", config.lora_r),
        "lora_alpha": ("lora_alpha", config.lora_alpha),
        "use_rslora": ("use_rslora", config.use_rslora),
    }
    for ours, (theirs, wanted) in pairs.items():
        if theirs in saved and saved[theirs] != wanted:
            there = saved[theirs]
            yield f"the adapters in {directory} have {ours}: {there}, and this run has {wanted}; set it to theirs"
    if config.lora_target_modules is not None and isinstance(saved.get("target_modules"), list):
        theirs_names = sorted(map(str, cast("list[object]", saved["target_modules"])))
        if theirs_names != sorted(config.lora_target_modules):
            yield (
                f"the adapters in {directory} are for {', '.join(theirs_names)}, and this run has lora_target_modules: "
                f"{', '.join(sorted(config.lora_target_modules))}; set it to theirs"
            )
    for unsupported in ("modules_to_save", "use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices"):
        if saved.get(unsupported):
            yield f"the adapters in {directory} have {unsupported}, which a run does not train; give a plain adapter"


def _layers_misfit(config: RunConfig, found: FoundSource) -> Iterator[str]:
    """Yield an error message if a linear layer in the model's blocks has no adapter in the source.

    The model must be a directory on this machine.
    """
    adapted = {
        layer.removeprefix("base_model.model.")
        for layer, matrix, _ in (name.rpartition(".lora_A.") for name in tensor_headers(found.weights))
        if matrix
    }
    blocks = {_blocks_of(layer) for layer in adapted} - {None}
    num_blocks = read_table(Path(config.model) / MODEL_CONFIG).get("num_hidden_layers")
    without = sorted(
        layer
        for layer in linear_layers(Path(config.model)) - adapted
        if _blocks_of(layer) in blocks and _last(layer) not in _ROUTERS and not _is_after(layer, num_blocks)
    )
    if without:
        yield (
            f"the adapters in {found.directory} are for {', '.join(sorted(set(map(_last, adapted))))}, and this run "
            f"trains adapters for every linear layer, also {without[0]}; set lora_target_modules to theirs"
        )


def _blocks_of(layer: str) -> str | None:
    match = _BLOCKS.match(layer)
    return None if match is None else match[1]


def _is_after(layer: str, num_blocks: Any) -> bool:
    """Whether a layer is in a multi-token prediction block after the model's last block. Such blocks are not loaded."""
    match = _BLOCKS.match(layer)
    return match is not None and isinstance(num_blocks, int) and int(match[2]) >= num_blocks


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]


def _reference_misfit(config: RunConfig, checkpoint: Path) -> Iterator[str]:
    if config.sync_ref_model and config.beta and not (checkpoint / _REFERENCE).is_dir():
        yield f"{checkpoint} has no reference model, which sync_ref_model moves on: its run did not have one"


def _has_another_length(config: RunConfig, theirs: Mapping[str, Any]) -> bool:
    """Whether the source's run, as far as its settings are known, has other settings for the number of steps."""
    names = ("max_steps",) if config.max_steps >= 0 else _LENGTH
    mine = json.loads(config.model_dump_json(include=set(names)))
    return any(name in theirs and theirs[name] != mine[name] for name in names)


def _schedule_of(found: FoundSource) -> _Schedule:
    """Return the learning-rate schedule in a checkpoint. It also counts the steps of runs before the checkpoint's."""
    file = found.directory / _CORE_STATE
    try:
        return msgspec.convert(read_table(file), _CoreState).schedule
    except msgspec.ValidationError as error:
        raise UserError(f"{file} is not the state of a training rank ({error}){_ONLY_WEIGHTS}", field=FIELD) from error


def _rows_left(config: RunConfig, found: FoundSource) -> tuple[RowCursor, list[str]]:
    """Return the position in the data at which the run begins, and a note if changed settings make it the first row."""
    if config.ignore_data_skip or found.state is None:
        return RowCursor(), []
    mine = json.loads(config.model_dump_json(include=set(_ROW_ORDER)))
    if changed := [name for name in _ROW_ORDER if name in found.config and found.config[name] != mine[name]]:
        return RowCursor(), [
            f"the run that is continued has another {', '.join(changed)}: the data begin with their first row"
        ]
    extra = found.state.extra
    try:
        left = _left(extra["ledger"], msgspec.convert(extra.get("rows", {}), RowCursor))
    except (KeyError, TypeError, HeadraceError, msgspec.ValidationError) as error:
        raise UserError(
            f"the position in the data cannot be read from {found.directory} ({error}); set ignore_data_skip: true to "
            "begin with the first row",
            field=FIELD,
        ) from error
    return left, []


def _left(ledger: Any, rows: RowCursor) -> RowCursor:
    """Return the rows that the checkpoint's run did not use. Raises HeadraceError if a number is implausibly large.

    Args:
        ledger: The ledger in the checkpoint: which groups were admitted, trained and dropped.
        rows: The position in the data at which the checkpoint's run began.
    """
    if ledger["admitted"] > _MAX_ADMITTED:
        raise HeadraceError(f"its run had more than {_MAX_ADMITTED:,} prompt groups")
    known = Ledger.from_json(ledger)
    left = rows.after(admitted=known.admitted, in_flight=known.left_over())
    if len(left.left) > _MAX_LEFT or max(left.next, *left.left, 0) > LARGEST:
        raise HeadraceError(f"it left more than {_MAX_LEFT:,} rows unused, or rows with numbers above {LARGEST:,}")
    return left
