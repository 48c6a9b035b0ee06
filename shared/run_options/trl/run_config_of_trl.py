"""Translates the options of ``trl grpo --config`` into a run.

    {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "use_vllm": False, ...}
        --run_config_of-->
    {"groups_per_step": 8, ...},  ["use_vllm: left out; the generator is always vLLM ...", ...]

An option with another name or form is translated. An option that a run does not have is left out with a note if the
policy learns the same without it, and is refused otherwise. Where different defaults would change the policy, the run
gets TRL's.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from shared.errors import UserError
from shared.near_name import nearest
from shared.run_options.from_trl import INSTEAD, OF_THE_CONSTRUCTOR, OF_VLLM
from shared.run_options.run_config import RunConfig
from shared.run_options.trl import data_of_trl, sampling_of_trl, training_of_trl
from shared.run_options.trl.translation import Translation
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS

_SUBJECTS: Final[tuple[Callable[[Translation], None], ...]] = (
    *(sampling_of_trl.sampling, sampling_of_trl.loss),
    *(training_of_trl.model, data_of_trl.data, data_of_trl.rewards, training_of_trl.batch, training_of_trl.memory),
    *(data_of_trl.evaluation, training_of_trl.optimizer, training_of_trl.compilation, training_of_trl.lora),
    training_of_trl.engine,
    *(data_of_trl.names, data_of_trl.saving, data_of_trl.best_checkpoint, data_of_trl.reports),
)

CHANGE_WHAT_IS_LEARNED: Final = frozenset(
    {
        *("fp16", "neftune_noise_alpha", "optim_target_modules", "hub_revision", "test_split_size"),
        *("lora_modules_to_save", "lora_target_parameters", "lora_task_type", "use_dora"),
        *("load_in_8bit", "bnb_4bit_quant_type"),
    }
)
"""Options that a run does not have, and that are refused unless they have TRL's default."""
MEAN_THE_SAME_HERE: Final = {"use_vllm": True, "disable_dropout": True, "do_train": True, "hub_strategy": "end"}
"""Values of options that a run does not have, for what it does anyway."""
_REFUSALS: Final = {
    "fp16": "a run has bfloat16 (bf16: true) or float32 (bf16: false)",
}
"""Sentences for those whose hint in an error message would not say what to write."""
_NEEDS: Final = {
    "num_completions_to_print": "log_completions",
    "log_unique_prompts": "log_completions",
    "hub_model_id": "push_to_hub",
    "ignore_data_skip": "resume_from_checkpoint",
    "hub_private_repo": "push_to_hub",
}
_LAUNCHER: Final = frozenset(
    {
        *("config_file", "dynamo_backend", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port"),
        *("mixed_precision", "multi_gpu", "num_cpu_threads_per_process", "num_machines", "use_deepspeed", "use_fsdp"),
    }
)
"""Options of ``accelerate launch``, which TRL passes on."""
_SERVICES_START_FIRST: Final = "set these variables for the services instead"


def run_config_of(trl: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a run config with the same meaning, and notes for the user, a sentence each. Nothing is validated.

    Args:
        trl: Options of TRL 1.16's ``GRPOConfig``, ``GRPOScriptArguments``, ``ModelConfig`` and
            ``DatasetMixtureConfig`` by name. Leave out options that were not chosen. ``num_processes`` is the number of
            training processes, 1 if left out; or ``accelerate_config`` names an accelerate configuration of TRL's.
            Settings of a run that TRL does not have, such as ``max_staleness``, are kept.

    Raises:
        UserError: An option is unknown, or a run cannot do what it asks for. ``problems`` has a sentence for each.
    """
    translation = Translation.of(trl)
    for translate in _SUBJECTS:
        translate(translation)
    _translate_the_rest(translation)
    if translation.problems:
        summary = "; ".join(f"{name}: {sentence}" for name, sentence in translation.problems)
        raise UserError(summary, field=translation.problems[0][0], problems=translation.problems)
    _leave_out_the_unread(translation)
    return translation.run, translation.notes


def _translate_the_rest(translation: Translation) -> None:
    """Keep options of the same name, refuse options that change what is learned, and leave the others out."""
    left_out: dict[str, list[str]] = {}
    for name, value in translation.left.items():
        if name in RunConfig.model_fields:
            translation.run[name] = value
        elif name == "env":
            left_out.setdefault(_SERVICES_START_FIRST, []).append(name)
        elif name not in TRL_DEFAULTS and name not in INSTEAD and name not in _LAUNCHER:
            near = nearest(name, TRL_DEFAULTS)
            hint = f"; did you mean {near}?" if near else ""
            translation.problems.append((name, f"TRL has no such option, and a run has no such setting{hint}"))
        elif name in OF_THE_CONSTRUCTOR or name in OF_VLLM:
            translation.problems.append((name, f"TRL has no such option; {INSTEAD[name]}"))
        elif name in CHANGE_WHAT_IS_LEARNED and value != TRL_DEFAULTS[name]:
            translation.problems.append((name, _REFUSALS.get(name, INSTEAD[name])))
        elif value not in (TRL_DEFAULTS.get(name), MEAN_THE_SAME_HERE.get(name)):
            left_out.setdefault(INSTEAD.get(name, INSTEAD["num_processes"]), []).append(name)
    translation.notes += [f"{', '.join(names)}: left out; {why}" for why, names in left_out.items()]


def _leave_out_the_unread(translation: Translation) -> None:
    """Leave out settings without effect, with a note. TRL ignores them, but a run would be refused with them."""
    run = translation.run
    unread = {name: f"{switch} is not set" for name, switch in _NEEDS.items() if run.get(name) and not run.get(switch)}
    unread |= RunConfig.model_construct(**run).unread()
    for name, why in unread.items():
        if name in run:
            del run[name]
            translation.notes.append(f"{name}: left out, as in TRL it has no effect; {why}")
