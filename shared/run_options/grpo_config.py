"""The options of TRL's ``GRPOConfig`` 1.16 under their names and with their defaults, as a dataclass without torch.

The class only holds them. trl/run_config_of_trl.py turns them into the settings of a run, with a note for each option
that is left out. docs/coming-from-trl.md has every option. A test in tests/conformance compares the class with TRL's.
"""

import contextlib
import functools
import json
import logging
import os
from collections.abc import Generator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, Literal, TypeVar, get_args

from shared.near_name import nearest
from shared.run_options.from_trl import INSTEAD, OF_THE_CONSTRUCTOR

DEFAULT_OUTPUT_DIR: Final = "trainer_output"
"""``output_dir`` if it is not set, as in transformers."""
NULL_MEANS: Final = frozenset({"vllm_importance_sampling_clip_max"})
"""Options of which None is a value; of all others it means that the option is not set, and the default counts."""


_Options = TypeVar("_Options")


def _explaining_unknown_options(kind: type[_Options]) -> type[_Options]:
    """Make a dataclass's constructor explain unknown options in its TypeError, and record the given options."""
    known = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    construct = kind.__init__

    @functools.wraps(construct)
    def explaining(self: _Options, *values: Any, **options: Any) -> None:
        options.pop("_given", None)  # from vars() of another one
        if unknown := [name for name in options if name not in known and type(self) is kind]:
            raise TypeError("; ".join(_unknown(name, known) for name in unknown))
        construct(self, *values, **options)
        named = dict(zip(known, values, strict=False)) | options
        if len(named) < len(known):  # a parser of a command line gives every option
            self.__dict__["_given"] = [name for name, value in named.items() if value is not None]

    kind.__init__ = explaining  # type: ignore[method-assign, assignment]
    return kind


def _unknown(name: str, known: list[str]) -> str:
    from shared.run_options.run_config import RunConfig  # it imports much

    says = f"GRPOConfig has no option {name}"
    if name in RunConfig.model_fields:
        return f"{says}; it is a setting of the run: run_options={{{name!r}: ...}}"
    if name in OF_THE_CONSTRUCTOR:
        return f"{says}; it is an argument of GRPOTrainer"
    if name in INSTEAD:
        return f"{says}; {INSTEAD[name]}"
    near = nearest(name, known) or nearest(name, RunConfig.model_fields)
    if near is None:
        return says
    return f"{says}; did you mean {near}?" if near in known else f"{says}; did you mean run_options={{{near!r}: ...}}?"


@_explaining_unknown_options
@dataclass
class GRPOConfig:
    """All options of TRL's ``GRPOConfig``, and headrace's own that TRL does not have.

    ``TrlParser`` turns the fields into command-line arguments. Of a union of three types it uses the second, so a table
    may also be given as JSON text.

    Args:
        early_stopping_patience: The training ends after this many evaluations in a row without an improvement, as with
            ``transformers.EarlyStoppingCallback``.
        early_stopping_threshold: Only a larger difference from the best value is an improvement.
        max_staleness: Most optimizer steps by which a completion may be stale; with 0, generation and training take
            turns, as in TRL.
        run_options: Further settings of the run, under their names in a run file; they win over all others.

    Raises:
        TypeError: An option does not exist.
        ValueError: The JSON text of a table is broken.
    """

    # Length of the run and batches
    output_dir: str | None = None
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    auto_find_batch_size: bool = False
    seed: int = 42
    data_seed: int | None = None
    full_determinism: bool = False

    # Optimizer
    learning_rate: float = 1e-06
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    warmup_steps: float = 0.0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-08
    optim_target_modules: list[str] | str | None = None
    max_grad_norm: float = 1.0

    # Computation
    average_tokens_across_devices: bool = True
    label_smoothing_factor: float = 0.0
    bf16: bool | None = None
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool = True
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    liger_kernel_config: dict[str, Any] | None = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    use_cpu: bool = False

    # Logs and trackers
    logging_strategy: str = "steps"
    logging_steps: float = 10
    logging_first_step: bool = False
    log_on_each_node: bool = True
    logging_nan_inf_filter: bool = True
    include_num_input_tokens_seen: str | bool = "no"
    log_level: str = "passive"
    log_level_replica: str = "warning"
    disable_tqdm: bool | None = None
    report_to: list[str] | str | None = "none"
    run_name: str | None = None
    project: str = "huggingface"
    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: Literal[False] | str | None = None

    # Evaluation
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0.0
    prediction_loss_only: bool = False
    eval_on_start: bool = False
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    eval_accumulation_steps: int | None = None
    include_for_metrics: list[str] = field(default_factory=list[str])
    batch_eval_metrics: bool = False

    # Checkpoints and the hub
    save_only_model: bool = False
    save_strategy: str = "steps"
    save_steps: float = 500
    save_on_each_node: bool = False
    save_total_limit: int | None = None
    enable_jit_checkpoint: bool = False
    push_to_hub: bool = False
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    ignore_data_skip: bool = False
    restore_callback_states_from_checkpoint: bool = False
    resume_from_checkpoint: str | None = None

    # Devices and processes
    accelerator_config: dict[str, Any] | str | None = None
    parallelism_config: Any | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None
    ddp_backend: str | None = None
    ddp_timeout: int = 1800
    fsdp: str | None = None
    fsdp_config: dict[str, Any] | str | None = None
    deepspeed: dict[str, Any] | str | None = None
    debug: str | list[str] = ""
    skip_memory_metrics: bool = True
    local_rank: int = -1

    # Data
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    remove_unused_columns: bool | None = False
    label_names: list[str] | None = None
    train_sampling_strategy: str = "random"
    length_column_name: str = "length"
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    # Model
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    router_aux_loss_coef: float | None = None
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False

    # Generation
    num_generations: int | None = 8
    num_generations_eval: int | None = None
    max_completion_length: int | None = 512
    ds3_gather_for_generation: bool = True
    shuffle_dataset: bool | None = True
    pad_to_multiple_of: int | str | None = "auto"
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    generation_kwargs: dict[str, Any] | str | None = None
    chat_template_kwargs: dict[str, Any] | str | None = None
    repetition_penalty: float = 1.0
    cache_implementation: str | None = None
    max_tool_calling_iterations: int | None = None

    # vLLM
    use_vllm: bool = False
    vllm_mode: str = "colocate"
    vllm_model_impl: str = "vllm"
    vllm_enable_sleep_mode: bool = False
    vllm_structured_outputs_regex: str | None = None
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216
    vllm_gpu_memory_utilization: float = 0.3
    vllm_max_model_length: int | None = None
    vllm_tensor_parallel_size: int = 1
    use_transformers_continuous_batching: bool = False
    transformers_continuous_batching_config: dict[str, Any] | str | None = None
    use_transformers_paged: bool = False

    # Loss
    beta: float = 0.0
    num_iterations: int = 1
    epsilon: float = 0.2
    delta: float | None = None
    epsilon_high: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    importance_sampling_level: str = "token"
    reward_weights: list[float] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    scale_rewards: str = "group"
    loss_type: str = "dapo"
    mask_truncated_completions: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    vllm_importance_sampling_cap: float | None = None

    # Logged completions
    log_completions: bool = False
    log_multimodal: bool = True
    num_completions_to_print: int | None = None
    log_unique_prompts: bool = False
    log_completions_hub_repo: str | None = None

    # Of headrace
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    max_staleness: int = 2
    run_options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        self.output_dir = os.path.expanduser(self.output_dir or DEFAULT_OUTPUT_DIR)
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(value, str) and value.startswith("{") and option.name in _TABLES:
                try:
                    setattr(self, option.name, json.loads(value))
                except ValueError as error:
                    raise ValueError(f"{option.name} is not a table in JSON ({error}): {value}") from error
            elif value is None and option.name not in NULL_MEANS:
                made = None if option.default_factory is MISSING else option.default_factory()
                setattr(self, option.name, made if option.default is MISSING else option.default)
        if self.eval_strategy == "steps" and not self.eval_steps and self.logging_steps > 0:
            self.eval_steps = self.logging_steps
        for name, value in self._following().items():
            if getattr(self, name) is None or name == "do_eval":
                setattr(self, name, value)

    def _following(self) -> dict[str, Any]:
        """Return the options that follow from others, as in transformers, but for the metric: a run has no loss."""
        following: dict[str, Any] = {}
        if self.eval_strategy != "no":
            following["do_eval"] = True
        if self.load_best_model_at_end:
            from shared.run_options.keeping import DEFAULT_BEST_METRIC  # it imports pydantic

            following["metric_for_best_model"] = DEFAULT_BEST_METRIC
        if metric := self.metric_for_best_model or following.get("metric_for_best_model"):
            following["greater_is_better"] = not metric.endswith("loss")
        return following

    @property
    def given(self) -> frozenset[str]:
        """Names of the options that the constructor was given. Empty if it was given all, as by a parser."""
        return frozenset(self.__dict__.get("_given", ()))

    def is_derived(self, name: str) -> bool:
        """Return whether an option was left out and has the value that follows from others, as ``do_eval`` may."""
        following = self._following()
        return name in following and name not in self.given and following[name] == getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a dict. Secret tokens are replaced by their option's name, as in transformers."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: f"<{name.upper()}>" if name.endswith("_token") else value for name, value in values.items()}

    def to_json_string(self) -> str:
        """Return the options as JSON. A value that JSON does not have, such as a torch.dtype, becomes text."""
        return json.dumps(self.to_dict(), indent=2, default=lambda value: str(value).removeprefix("torch."))

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the options for trackers. Values other than numbers and text become text."""
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in self.to_dict().items()}

    @property
    def world_size(self) -> int:
        """Number of the script's processes: 1. The training ranks are in the services."""
        return 1

    @property
    def process_index(self) -> int:
        """Number of the script's process: 0."""
        return 0

    local_process_index = process_index

    @property
    def n_gpu(self) -> int:
        """Number of GPUs that the script trains on: 0. The training ranks have them."""
        return 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: True, as it is the only one."""
        return True

    should_log = should_save

    @property
    def device(self) -> str:
        """Device of the script's own tensors: the CPU. The training ranks have the GPUs."""
        return "cpu"

    def get_process_log_level(self) -> int:
        """Return ``log_level`` as a level of the module logging; transformers' own level if it is ``passive``."""
        if self.log_level == "passive":
            return logging.getLogger("transformers").getEffectiveLevel()
        return logging.getLevelNamesMapping().get(self.log_level.upper(), logging.NOTSET)

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Generator[None]:
        """Run the block without waiting, because the script is the only process."""
        del local, desc
        yield

    @property
    def train_batch_size(self) -> int:
        """Number of completions in a training pass: ``per_device_train_batch_size``, for one device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Number of completions in an evaluation pass: ``per_device_eval_batch_size``, for one device."""
        return self.per_device_eval_batch_size


_TABLES: Final = frozenset(option.name for option in fields(GRPOConfig) if dict[str, Any] in get_args(option.type))
"""Options that may be a table. Found here, because ``TrlParser`` changes the types of the fields."""
