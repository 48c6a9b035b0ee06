"""What a run takes over from a checkpoint, and which checkpoints do not fit it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.beginning.fit import beginning_of
from services.trainer.beginning.source import find_source
from services.trainer.checkpoints.manifest import write_manifest
from shared.beginning import Beginning, RowCursor
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.run_options.run_config import parse_run_config
from tests.trainer.beginning.made_checkpoints import make_adapter, make_checkpoint, make_model, write_tensors

pytestmark = pytest.mark.unit

LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def begin(tmp_path: Path, directory: Path, **settings: Any) -> tuple[Beginning, list[str]]:
    model = tmp_path / "base"
    if not model.exists():
        make_model(model)
    plain = {"model": str(model), "dataset_name": "/data.jsonl", "reward_funcs": ["accuracy_reward"]}
    config = parse_run_config(plain | {"resume_from_checkpoint": str(directory)} | settings)
    return beginning_of(config, find_source(str(directory), runs=[], roots=FileRoots((str(tmp_path),), "ROOTS")))


def refusal(tmp_path: Path, directory: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as refused:
        begin(tmp_path, directory, **settings)
    assert {field for field, _ in refused.value.problems} == {"resume_from_checkpoint"}
    return str(refused.value)


def source(tmp_path: Path, *, settings: dict[str, Any] | None = None, **about: Any) -> Path:
    """Write a checkpoint of a run on /data.jsonl: 10 rows were taken, and 4, 7 and 8 are not settled."""
    run_dir = tmp_path / "run-source"
    ledger = {"admitted": 10, "trained": [[0, 3], [5, 6]], "dropped": {"too_stale": [[9, 9]]}}
    given: dict[str, Any] = {"step": 4, "ledger": ledger} | about
    path = make_checkpoint(run_dir, **given)
    config = {"reward_funcs": ["x"], "dataset_name": "/data.jsonl", "seed": 42, "shuffle_dataset": True}
    config |= settings or {}
    (run_dir / "config.json").write_text(json.dumps(config))
    return path


def change_core_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change core_state.json of a checkpoint, and write a manifest that fits it."""
    state = json.loads((checkpoint / "core_state.json").read_text())
    change(state)
    (checkpoint / "core_state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)


def test_everything_is_continued_by_default(tmp_path: Path) -> None:
    beginning, notes = begin(tmp_path, source(tmp_path, steps_before=3))
    assert (beginning.weights_only, beginning.step, beginning.steps_before, notes) == (False, 4, 7, [])
    assert beginning.rows == RowCursor(left=(4, 7, 8), next=10)


def test_with_only_the_model_everything_else_begins_anew(tmp_path: Path) -> None:
    beginning, notes = begin(tmp_path, source(tmp_path), resume_only_model=True, optim="sgd")
    assert (beginning.weights_only, beginning.steps_before, beginning.rows, notes) == (True, 0, RowCursor(), [])


@pytest.mark.parametrize(
    ("theirs", "settings", "jumps"),
    [
        ({"max_steps": 4}, {"max_steps": 8}, True),
        ({"max_steps": 8}, {"max_steps": 8}, False),
        ({"max_steps": 4}, {"max_steps": 8, "lr_scheduler_type": "constant"}, False),
        ({"max_steps": 4}, {"max_steps": 8, "resume_only_model": True}, False),
        ({"max_steps": -1, "num_train_epochs": 2.0}, {"num_train_epochs": 3.0}, True),
        ({"max_steps": 8, "num_train_epochs": 2.0}, {"max_steps": 8, "num_train_epochs": 3.0}, False),
        ({"max_steps": -1, "groups_per_step": 8}, {"groups_per_step": 16}, True),
        ({"max_steps": -1, "groups_per_step": 8}, {"groups_per_step": 8}, False),
        ({"max_steps": 8, "groups_per_step": 8}, {"max_steps": 8, "groups_per_step": 16}, False),
        ({"max_steps": -1, "steps_per_generation": 1}, {"steps_per_generation": 2}, True),
        ({"max_steps": -1, "num_iterations": 1}, {"num_iterations": 2}, True),
    ],
)
def test_a_schedule_of_another_length_is_noted(
    tmp_path: Path, theirs: dict[str, Any], settings: dict[str, Any], jumps: bool
) -> None:
    _, notes = begin(tmp_path, source(tmp_path, settings=theirs), **settings)
    says = (
        "the learning rate, which was 1e-06, may jump: lr_scheduler_type linear goes on as if a run of the new length "
        "had made the 4 steps before"
    )
    assert notes == ([says] if jumps else [])


def test_data_may_begin_anew_while_the_schedule_goes_on(tmp_path: Path) -> None:
    beginning, notes = begin(tmp_path, source(tmp_path), ignore_data_skip=True)
    assert (beginning.steps_before, beginning.rows, notes) == (4, RowCursor(), [])


@pytest.mark.parametrize("given", [{}, {"max_steps": 8}])
def test_another_data_set_is_another_length_unless_max_steps_is_given(tmp_path: Path, given: dict[str, Any]) -> None:
    path = source(tmp_path, settings=given)
    _, notes = begin(tmp_path, path, dataset_name="/more.jsonl", **given)
    assert any("the learning rate, which was 1e-06, may jump" in note for note in notes) == (not given)


@pytest.mark.parametrize("change", [{"dataset_name": "/more.jsonl"}, {"seed": 7}, {"shuffle_dataset": False}])
def test_other_data_begin_with_their_first_row_and_the_user_is_told(tmp_path: Path, change: dict[str, Any]) -> None:
    beginning, notes = begin(tmp_path, source(tmp_path), max_steps=9, **change)
    assert beginning.rows == RowCursor()
    assert notes == [f"the run that is continued has another {next(iter(change))}: the data begin with their first row"]


@pytest.mark.parametrize(
    ("theirs", "change"),
    [({}, "dataset_streaming"), ({"dataset_streaming": True, "shuffle_buffer_size": 500}, "shuffle_buffer_size")],
)
def test_a_stream_in_another_order_begins_with_its_first_row(
    tmp_path: Path, theirs: dict[str, Any], change: str
) -> None:
    """A row's number means another row if the data are shuffled in other blocks."""
    path = source(tmp_path, settings={"dataset_streaming": False, "shuffle_buffer_size": 1000} | theirs)
    beginning, notes = begin(tmp_path, path, dataset_streaming=True, max_steps=9)
    assert beginning.rows == RowCursor()
    assert notes == [f"the run that is continued has another {change}: the data begin with their first row"]


def test_the_rows_of_a_continued_run_are_those_that_were_left_to_it(tmp_path: Path) -> None:
    ledger: dict[str, Any] = {"admitted": 2, "trained": [[0, 0]], "dropped": {}}
    beginning, _ = begin(tmp_path, source(tmp_path, ledger=ledger, rows={"left": [4, 7, 8], "next": 10}))
    assert beginning.rows == RowCursor(left=(7, 8), next=10)


def test_rows_that_were_in_flight_when_the_run_ended_come_first(tmp_path: Path) -> None:
    """The last checkpoint of a run counts them as dropped."""
    dropped = {"too_stale": [[2, 2]], "run_stopped": [[3, 4], [7, 7]], "run_ended": [[6, 6]]}
    ledger: dict[str, Any] = {"admitted": 8, "trained": [[0, 1], [5, 5]], "dropped": dropped}
    beginning, _ = begin(tmp_path, source(tmp_path, ledger=ledger))
    assert beginning.rows == RowCursor(left=(3, 4, 6, 7), next=8)


def test_a_checkpoint_of_a_release_that_cannot_be_read_says_how_to_go_on_without_the_position(tmp_path: Path) -> None:
    broken = source(tmp_path, ledger={"admitted": 1, "trained": [[0, 5]], "dropped": {}})
    with pytest.raises(UserError, match=r"the position in the data cannot be read.*set ignore_data_skip: true"):
        begin(tmp_path, broken)
    begin(tmp_path, broken, ignore_data_skip=True)


@pytest.mark.parametrize("last_epoch", [-1, 1e999, "4", 2**60, None, True])
def test_a_forged_step_never_gets_into_the_record_of_a_run(tmp_path: Path, last_epoch: Any) -> None:
    forged = source(tmp_path)
    change_core_state(forged, lambda state: state["schedule"].update(last_epoch=last_epoch))
    with pytest.raises(UserError, match=r"core_state\.json is not the state of a training rank .*\.last_epoch`"):
        begin(tmp_path, forged)


@pytest.mark.parametrize("missing", ["schedule", "adam_steps", "entropy", "schedule.base_lrs", "schedule._last_lr"])
def test_a_state_without_a_part_that_the_training_rank_needs_is_refused(tmp_path: Path, missing: str) -> None:
    forged = source(tmp_path)
    *within, key = missing.split(".")
    change_core_state(forged, lambda state: (state["schedule"] if within else state).pop(key))
    sentence = rf"core_state\.json is not the state of a training rank \(.*`{key}`.*\); or set resume_only_model: true"
    with pytest.raises(UserError, match=sentence):
        begin(tmp_path, forged)
    assert begin(tmp_path, forged, resume_only_model=True)[0].weights_only


@pytest.mark.parametrize("admitted", [10**8, 10**30, "many", None])
def test_a_ledger_that_would_fill_the_memory_is_not_read(tmp_path: Path, admitted: Any) -> None:
    forged = source(tmp_path, ledger={"admitted": admitted, "trained": [[0, 10**8]], "dropped": {}})
    with pytest.raises(UserError, match="the position in the data cannot be read"):
        begin(tmp_path, forged)


@pytest.mark.parametrize(
    ("admitted", "rows"),
    [(10**6, {}), (0, {"left": list(range(200_000))}), (0, {"left": [10**30]}), (0, {"next": 2**62})],
)
def test_rows_that_no_run_can_have_left_are_not_taken_over(tmp_path: Path, admitted: int, rows: dict[str, Any]) -> None:
    forged = source(tmp_path, ledger={"admitted": admitted, "trained": [], "dropped": {}}, rows=rows)
    with pytest.raises(UserError, match=r"the position in the data cannot be read.*set ignore_data_skip: true"):
        begin(tmp_path, forged)


def test_a_model_directory_gives_only_weights_and_the_user_is_told(tmp_path: Path) -> None:
    model = make_model(tmp_path / "theirs")
    beginning, notes = begin(tmp_path, model)
    assert (beginning.weights_only, beginning.step) == (True, None)
    assert "has only weights: this run takes them, and begins optimizer, schedule and data anew" in notes[0]
    assert begin(tmp_path, model, resume_only_model=True)[1] == []


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, make_model(tmp_path / "theirs", hidden_size=128))
    assert "has the weights of another model: hidden_size is 128 there and 64 in" in said


@pytest.mark.parametrize("kept_bytes", [0, 4, 40])
def test_a_weight_file_that_was_cut_off_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    file = make_model(tmp_path / "theirs") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert f"{file} is damaged: its header cannot be read" in refusal(tmp_path, file.parent)


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_weight_file_is_refused_and_nothing_waits_for_its_other_end(tmp_path: Path) -> None:
    file = make_model(tmp_path / "theirs") / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    assert f"{file} is damaged: its header cannot be read" in refusal(tmp_path, file.parent)


def test_weights_that_are_not_floats_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "theirs")
    write_tensors(model / "model.safetensors", ["w"], dtype="F8_E4M3")
    assert "has weights of dtype F8_E4M3" in refusal(tmp_path, model)


def test_whole_models_and_adapters_do_not_replace_each_other(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter")
    assert "has LoRA adapters, but this run trains all weights" in refusal(tmp_path, adapter)
    said = refusal(tmp_path, make_model(tmp_path / "theirs"), use_peft=True)
    assert "has the weights of a whole model, but this run trains adapters" in said


@pytest.mark.parametrize("is_checkpoint", [True, False])
def test_adapters_must_have_the_rank_scale_and_layers_of_the_run(tmp_path: Path, is_checkpoint: bool) -> None:
    where = source(tmp_path, adapter=LORA) if is_checkpoint else make_adapter(tmp_path / "adapter", **LORA)
    same: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_alpha": 16}
    beginning, _ = begin(tmp_path, where, **same, lora_target_modules=["v_proj", "q_proj"])
    assert beginning.source == ("checkpoint" if is_checkpoint else "adapter")
    said = refusal(tmp_path, where, use_peft=True, lora_r=16, lora_alpha=32, lora_target_modules=["k_proj"])
    assert "have lora_r: 8, and this run has 16; set it to theirs" in said
    assert "have lora_alpha: 16, and this run has 32" in said
    assert "are for q_proj, v_proj, and this run has lora_target_modules: k_proj" in said


def test_adapters_of_a_base_in_four_bits_are_for_such_a_base(tmp_path: Path) -> None:
    run: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_alpha": 16, "dtype": "bfloat16"}
    path = source(tmp_path, adapter=LORA, settings={"load_in_4bit": True})
    assert begin(tmp_path, path, load_in_4bit=True, **run)[0].source == "checkpoint"
    for only_model in (False, True):
        assert refusal(tmp_path, path, resume_only_model=only_model, **run) == (
            f"the adapters in {path} were trained on a base with load_in_4bit: true, and this run has false; set it to "
            "theirs"
        )


def test_adapters_must_be_for_every_linear_layer_if_the_run_names_none(tmp_path: Path) -> None:
    base, adapter = make_model(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    layers = [f"model.layers.{block}.{name}" for block in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
    others = ["model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.up_proj", "vision.0.fc1"]
    others.append("model.layers.2.eh_proj")  # predicts a further token, and is not loaded
    write_tensors(base / "model.safetensors", [f"{name}.weight" for name in layers + others], dimensions=2)

    def adapt(some: list[str]) -> None:
        names = [f"base_model.model.{layer}.{matrix}.weight" for layer in some for matrix in ("lora_A", "lora_B")]
        write_tensors(adapter / "adapter_model.safetensors", names, dimensions=2)

    adapt(layers)
    assert begin(tmp_path, adapter, use_peft=True)[0].source == "adapter"
    adapt([layer for layer in layers if layer.endswith("q_proj")])
    assert refusal(tmp_path, adapter, use_peft=True) == (
        f"the adapters in {adapter} are for q_proj, and this run trains adapters for every linear layer, also "
        "model.layers.0.mlp.up_proj; set lora_target_modules to theirs"
    )
    assert begin(tmp_path, adapter, use_peft=True, lora_target_modules=["q_proj"])[0].source == "adapter"
    adapt(layers[:2])
    assert "also model.layers.1.mlp.up_proj" in refusal(tmp_path, adapter, use_peft=True)


def test_an_adapter_with_more_than_two_matrices_is_refused(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", use_dora=True)
    assert "have use_dora, which a run does not train" in refusal(tmp_path, adapter, use_peft=True)


@pytest.mark.parametrize(
    ("moments", "optim", "kind"),
    [
        (("exp_avg", "exp_avg_sq"), "sgd", "adamw_torch_fused or adamw_torch"),
        (("square_avg",), "adamw_torch", "rmsprop"),
        ((), "adagrad", "sgd"),
        (("exp_avg", "exp_avg_sq"), "muon", "adamw_torch_fused or adamw_torch"),
        (("momentum_buffer",), "adamw_torch", "muon or sgd"),
        (("state1", "state2"), "lion_32bit", "adamw_8bit or .* or paged_ademamix_32bit"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    tmp_path: Path, moments: tuple[str, ...], optim: str, kind: str
) -> None:
    said = refusal(tmp_path, source(tmp_path, moments=moments), optim=optim)
    assert re.search(f"is that of optim: {kind}, and this run has optim: {optim}; or set resume_only_model: true", said)


@pytest.mark.parametrize(
    ("moments", "settings"),
    [
        ((), {"optim": "sgd"}),
        (("momentum_buffer",), {"optim": "sgd", "optim_args": "momentum=0.9"}),
        (("square_avg", "grad_avg"), {"optim": "rmsprop", "optim_args": "centered=true"}),
        (("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"), {"optim": "adafactor"}),
        (("momentum_buffer", "exp_avg", "exp_avg_sq"), {"optim": "muon"}),
        (("state1", "state2", "qmap1", "absmax1", "qmap2", "absmax2"), {"optim": "adamw_8bit"}),
        (("state1",), {"optim": "lion_32bit"}),
    ],
)
def test_every_kind_of_optimizer_continues_its_own_state(
    tmp_path: Path, moments: tuple[str, ...], settings: dict[str, Any]
) -> None:
    beginning, _ = begin(tmp_path, source(tmp_path, moments=moments), **settings)
    assert beginning.steps_before == 4


def test_the_settings_of_the_source_tell_apart_what_the_names_do_not(tmp_path: Path) -> None:
    path = source(tmp_path, moments=("state1",), settings={"optim": "rmsprop_bnb"})
    begin(tmp_path, path, optim="rmsprop_bnb_32bit")
    assert "is that of optim: rmsprop_bnb, and this run has optim: lion_32bit" in refusal(
        tmp_path, path, optim="lion_32bit"
    )


@pytest.mark.parametrize(
    ("moments", "settings", "missing"),
    [
        (("square_avg",), {"optim": "rmsprop", "optim_args": "momentum=0.9"}, "momentum_buffer"),
        (("momentum_buffer",), {"optim": "muon"}, "exp_avg, exp_avg_sq"),
        (("state1",), {"optim": "lion_8bit"}, "qmap1"),
    ],
)
def test_state_that_the_optimizer_would_look_for_in_vain_is_refused(
    tmp_path: Path, moments: tuple[str, ...], settings: dict[str, Any], missing: str
) -> None:
    said = refusal(tmp_path, source(tmp_path, moments=moments), **settings)
    assert f"does not have {missing}, which optim: {settings['optim']} needs with this run's settings" in said


def test_both_adams_continue_each_other(tmp_path: Path) -> None:
    begin(tmp_path, source(tmp_path), optim="adamw_torch")


def test_a_moving_reference_needs_one_to_go_on_with(tmp_path: Path) -> None:
    said = refusal(tmp_path, source(tmp_path), beta=0.1, sync_ref_model=True)
    assert "has no reference model, which sync_ref_model moves on" in said
