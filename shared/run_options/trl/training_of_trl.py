"""Translates TRL's options of the model, the batch, the optimizer, adapters and the engine into settings of a run.

Each function takes its options out of the translation, and adds the run's settings, notes and problems.
"""

from typing import Any, Final, cast, get_args

from shared.run_options.optimizers import ADAM_OPTIONS, FACTS, Optimizer
from shared.run_options.run_config import RunConfig
from shared.run_options.training import CUDA_GRAPH_MODES, Attention
from shared.run_options.trl.translation import Translation
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS

_NUM_PROCESSES: Final = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8)
"""Training processes of the accelerate configurations that come with TRL."""
_ONLY_LOADING: Final = ("device_map", "low_cpu_mem_usage", "use_cache", "use_safetensors")


def model(translation: Translation) -> None:
    """Translate the model, its dtype and its attention."""
    init: Any = translation.take("model_init_kwargs") or {}
    renamed = {"torch_dtype": "dtype", "revision": "model_revision"}
    for name, value in cast("dict[str, Any]", init).items():
        if name in ("torch_dtype", "dtype", "revision", "attn_implementation", "trust_remote_code"):
            translation.left[renamed.get(name, name)] = value
        elif name not in _ONLY_LOADING:
            translation.problems.append((f"model_init_kwargs.{name}", "a run does not pass it to the model"))
    if (name := translation.take("model_name_or_path")) is not None:
        translation.run["model"] = name
    attention = translation.left.get("attn_implementation", "auto")
    if attention not in get_args(Attention):
        translation.drop("attn_implementation", why=f"{attention} is not offered, and auto chooses")
    _dtype(translation)


def _dtype(translation: Translation) -> None:
    was_chosen = {"bf16", "dtype", "torch_dtype"} & translation.left.keys()
    older = translation.take("torch_dtype")
    bf16, of_weights = translation.take("bf16"), str(translation.take("dtype") if older is None else older)
    of_weights = of_weights.removeprefix("torch.")
    if of_weights not in ("float32", "bfloat16") and (of_weights != "auto" or bf16 is False):
        translation.problems.append(("dtype", f"is {of_weights}; a run has float32 or bfloat16"))
    is_bfloat16 = bf16 is not False or of_weights == "bfloat16"
    translation.run["dtype"] = "bfloat16" if is_bfloat16 else "float32"
    if not was_chosen:
        translation.notes.append("dtype: bfloat16 is TRL's default (bf16: true); bf16: false makes it float32")
    elif of_weights == "bfloat16":
        translation.notes.append("dtype: the computation is in bfloat16, but the trained weights are float32")


def batch(translation: Translation) -> None:
    """Translate a process's batch size into groups per step, and a generation's micro-steps into optimizer steps."""
    per_device = translation.take("per_device_train_batch_size")
    accumulated = translation.take("gradient_accumulation_steps")
    is_told = bool({"num_processes", "accelerate_config"} & translation.left.keys())
    processes = _num_processes(translation)
    num_generations = translation.value("num_generations")
    completions = per_device * accumulated * processes
    product = f"{per_device} a process x {accumulated} accumulated x {processes} process{'es' * (processes > 1)}"
    groups, rest = divmod(completions, num_generations)
    if rest:
        translation.problems.append(
            (
                "per_device_train_batch_size",
                f"an optimizer step has {product} = {completions} completions, which are not whole groups of "
                f"num_generations={num_generations}; change gradient_accumulation_steps",
            )
        )
        return
    translation.run["groups_per_step"] = groups
    hint = "" if is_told else "; set num_processes if TRL starts several"
    translation.notes.append(f"groups_per_step: {groups}, as {product} / num_generations {num_generations}{hint}")
    steps = _steps_per_generation(translation, accumulated=accumulated, per_micro_step=per_device * processes)
    if steps > 1:
        translation.run["steps_per_generation"] = steps
    iterations = translation.value("num_iterations")
    if "max_staleness" not in translation.left:
        staleness = RunConfig.model_fields["max_staleness"].default
        steps *= iterations
        if steps > 1:
            staleness = translation.run["max_staleness"] = max(staleness, 2 * steps - 1)
        translation.notes.append(
            f"max_staleness: completions are up to {staleness} optimizer steps old when they are trained on; with "
            f"max_staleness: {steps - 1} generation and training take turns, as in TRL"
        )


def _num_processes(translation: Translation) -> int:
    name: Any = translation.left.pop("accelerate_config", None)
    if "num_processes" in translation.left:
        return int(translation.take("num_processes"))
    if name is not None and name not in _NUM_PROCESSES:
        translation.problems.append(("accelerate_config", f"{name} is not known; set num_processes instead"))
    return _NUM_PROCESSES.get(str(name), 1)


def _steps_per_generation(translation: Translation, *, accumulated: int, per_micro_step: int) -> int:
    """Return the number of optimizer steps into which the completions of one generation are split."""
    micro_steps, size = translation.take("steps_per_generation"), translation.take("generation_batch_size")
    if micro_steps is not None and size is not None:
        translation.problems.append(("generation_batch_size", "is set, and steps_per_generation too; give only one"))
    if size is not None:
        name, micro_steps = "generation_batch_size", size / per_micro_step
    else:
        name, micro_steps = "steps_per_generation", accumulated if micro_steps is None else micro_steps
    if micro_steps < accumulated and translation.value("num_iterations") != 1:
        translation.problems.append(
            (
                name,
                f"the completions of one generation make {micro_steps:g} micro-steps, and with num_iterations TRL "
                f"trains them more than once in one optimizer step of {accumulated} (gradient_accumulation_steps); "
                "make it at least as many",
            )
        )
    if micro_steps <= accumulated:  # several generations make one optimizer step, and come from the same weights
        if micro_steps < accumulated and _is_normalised_by_batch(translation):
            translation.notes.append(
                f"{name}: an optimizer step is one batch here, whose tokens and rewards are normalised together; TRL "
                f"samples {accumulated / micro_steps:g} batches for it, and normalises each by itself"
            )
        return 1
    if micro_steps % accumulated:
        translation.problems.append(
            (
                name,
                f"the completions of one generation make {micro_steps:g} micro-steps, and an optimizer step takes "
                f"{accumulated} (gradient_accumulation_steps); make it a multiple",
            )
        )
    return int(micro_steps // accumulated)


def _is_normalised_by_batch(translation: Translation) -> bool:
    """Return whether the loss or the advantages of a completion depend on the other groups of its batch."""
    return (
        translation.value("loss_type") in ("dapo", "cispo", "vespo")
        or translation.value("scale_rewards") == "batch"
        or translation.value("multi_objective_aggregation") == "normalize_then_sum"
    )


def memory(translation: Translation) -> None:
    """Raise ``max_tokens_per_microbatch`` to the tokens of the longest rollout, unless it was given."""
    lengths = (translation.value("max_completion_length"), translation.left.get("max_prompt_length", 0))
    if "max_tokens_per_microbatch" in translation.left or not all(isinstance(length, int) for length in lengths):
        return
    if sum(lengths) > RunConfig.model_fields["max_tokens_per_microbatch"].default:
        translation.run["max_tokens_per_microbatch"] = sum(lengths)


def optimizer(translation: Translation) -> None:
    """Translate the optimizer and its warm-up."""
    optim = translation.value("optim")
    if optim not in get_args(Optimizer):
        offered = ", ".join(get_args(Optimizer))
        translation.problems.append(("optim", f"{translation.take('optim')} is not offered; a run has {offered}"))
    else:
        facts = FACTS[optim]
        unused = [name for name in ADAM_OPTIONS if name not in facts.adam_options]
        translation.drop(*unused, why=f"optim {optim} does not use it")
        if not facts.arguments:
            translation.drop("optim_args", why=f"optim {optim} does not use it")
    if translation.value("lr_scheduler_type") == "constant":
        of_warmup = ("warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
        translation.drop(*of_warmup, why="lr_scheduler_type constant does not use it")
    ratio = translation.left.pop("warmup_ratio", 0)
    if ratio and not translation.value("warmup_steps"):
        translation.run["warmup_steps"] = ratio


def compilation(translation: Translation) -> None:
    """Translate the options of torch.compile, each of which turns it on, as in transformers."""
    backend, mode = translation.value("torch_compile_backend"), translation.value("torch_compile_mode")
    if backend is None and mode is None:
        return
    translation.left["torch_compile"] = True
    if mode in CUDA_GRAPH_MODES:
        translation.drop("torch_compile_mode", why=f"{mode} records CUDA graphs, and passes differ in size")


def lora(translation: Translation) -> None:
    """Translate the options of adapters, which TRL ignores without ``use_peft``."""
    options = [name for name in TRL_DEFAULTS if name.startswith("lora_")]
    if not translation.value("use_peft"):
        translation.drop(*options, "use_dora", "use_rslora", why="use_peft is not set")
        return
    translation.run["lora_dropout"] = translation.take("lora_dropout")
    targets = translation.take("lora_target_modules")
    if targets is None:
        translation.notes.append(
            "lora_target_modules: every linear layer gets an adapter; PEFT chooses a few for each architecture"
        )
    else:
        translation.run["lora_target_modules"] = [targets] if isinstance(targets, str) else targets


def engine(translation: Translation) -> None:
    """Translate TRL's ``vllm_*`` options into the run's ``vllm`` table. Sleep mode is dropped if it is not possible."""
    arguments: dict[str, Any] = translation.left.pop("vllm", {})
    for name, argument in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_tensor_parallel_size", "tensor_parallel_size"),
        ("vllm_max_model_length", "max_model_len"),
    ):
        if name in translation.left:
            arguments = {argument: translation.take(name), **arguments}
    if arguments:
        translation.run["vllm"] = arguments
    if translation.left.get("vllm_enable_sleep_mode") and translation.left.get("max_staleness") != 0:
        why = "a generator sleeps only with max_staleness: 0, push_staging: none and the trainer on the same GPU"
        translation.drop("vllm_enable_sleep_mode", why=why)
