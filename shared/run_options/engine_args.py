"""Decides whether a run or an operator may set an engine argument of vLLM, and gives the reason if not.

Does not import vLLM, which the run API does not have.

    headrace's own    <    the run's `vllm:` section    <    HEADRACE_ENGINE_ARGS of a replica

The last one wins. A run may set only the arguments in engine_arg_names.py. RESERVED arguments may be set in neither
place. OPERATORS' arguments depend on the machine, name files there, or load code, so a run may not set them: a user who
may submit a run may not run code on the generators.

`default_max_model_len` returns the default of the one argument that the checks of a run need, `max_model_len`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from shared.near_name import nearest
from shared.run_options.engine_arg_names import MODEL_FREE_METHODS, RUN_ENGINE_ARGS, SPECULATIVE_METHODS, TABLES

_RUN = "the run's own settings decide it"
_TRUTH = "the recorded data of a rollout would no longer be true"
_TEXT = "the policy only takes text"
_LORA = "the run's own settings say which adapter is served"
_REPLICA = "one replica is one engine; start more replicas, which a run finds by itself"
_QUEUE = "prompts in flight are bounded by max_inflight_groups; the engine must refuse none"
_DEAD = "a replica whose engine has failed is started again at once"

_STATED_STRETCHED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embeddings whose factor vLLM 0.32 ignores."""

RESERVED_ENGINE_ARGS = {
    "model": _RUN,
    "model_weights": _RUN,
    "tokenizer": _RUN,
    "revision": "the setting is model_revision",
    "tokenizer_revision": "the setting is model_revision",
    "dtype": _RUN,
    "trust_remote_code": "code of a model's repository is never run",
    "code_revision": "code of a model's repository is never run",
    "hf_overrides": "the trainer computes with the model's own config",
    "hf_config_path": "the trainer computes with the model's own config",
    "model_class_overrides": "the trainer computes with the model's own architecture",
    "runner": "the engine generates",
    "convert": "the engine generates",
    "pooler_config": "the engine generates",
    "diffusion_config": "the engine samples one token after the other",
    "skip_tokenizer_init": "reward functions see text",
    "enable_prompt_embeds": "prompts are token ids",
    "tokens_only": "reward functions see text",
    "language_model_only": _TEXT,
    "mm_encoder_only": _TEXT,
    "enable_mm_embeds": _TEXT,
    "allowed_local_media_path": _TEXT,
    "allowed_media_domains": _TEXT,
    "logprobs_mode": _TRUTH,
    "generation_config": "only the run's sampling settings count",
    "override_generation_config": "only the run's sampling settings count",
    "watermark_config": "a watermark changes the samples, and the recorded logprobs do not show it",
    "enable_trace_replay": _TRUTH,
    "return_sampling_mask": "it needs a top_k in every request, and the probe after a push has none",
    "weight_transfer_config": "weight_transport and the run's push settings decide it",
    "worker_extension_cls": "the weight push has its own extension",
    "scheduling_policy": "the probe after a push comes before everything else",
    "enable_sleep_mode": "the setting is vllm_enable_sleep_mode",
    "enable_lora": "the setting is use_peft",
    "max_lora_rank": "the setting is lora_r",
    "max_loras": "a run has one adapter",
    "max_cpu_loras": "a run has one adapter",
    "default_mm_loras": _TEXT,
    "lora_target_modules": _LORA,
    "max_lora_cls_labels": _LORA,
    "seed": "replicas with one seed would sample the same completions",
    "disable_log_stats": "max_inflight_groups needs the engine's statistics",
    "max_num_queued_reqs": _QUEUE,
    "max_num_queued_tokens": _QUEUE,
    "data_parallel_rank": _REPLICA,
    "data_parallel_start_rank": _REPLICA,
    "data_parallel_hybrid_lb": _REPLICA,
    "data_parallel_external_lb": _REPLICA,
    "data_parallel_multi_port_external_lb": _REPLICA,
    "enable_elastic_ep": _REPLICA,
    "elastic_ep_max_dp_size": _REPLICA,
    "_api_process_count": _REPLICA,
    "_api_process_rank": _REPLICA,
    "enable_fault_tolerance": _DEAD,
    "fault_tolerance_config": _DEAD,
    "limit_mm_per_prompt": _TEXT,
    "interleave_mm_strings": _TEXT,
    "media_io_kwargs": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "mm_processor_cache_gb": _TEXT,
    "mm_processor_cache_type": _TEXT,
    "mm_hasher_algorithm": _TEXT,
    "mm_shm_cache_max_object_size_mb": _TEXT,
    "mm_encoder_tp_mode": _TEXT,
    "mm_encoder_attn_backend": _TEXT,
    "mm_encoder_attn_dtype": _TEXT,
    "mm_encoder_fp8_scale_path": _TEXT,
    "mm_encoder_fp8_scale_save_path": _TEXT,
    "mm_encoder_fp8_scale_save_margin": _TEXT,
    "skip_mm_profiling": _TEXT,
    "video_pruning_rate": _TEXT,
    "video_pruning_method": _TEXT,
    "mm_tensor_ipc": _TEXT,
    "mm_processor_device": _TEXT,
    "mm_ipc_gpu_memory_gb": _TEXT,
    "mm_device_do_normalize": _TEXT,
    "disable_chunked_mm_input": _TEXT,
    "enable_mm_processor_stats": _TEXT,
    "enable_tower_connector_lora": _TEXT,
}
"""Name of the argument to a clause that follows "cannot be set: "."""

_CODE = "it makes vLLM load code or files"
_MACHINE = "it is about the machine of a replica"
_LOG = "the operator of a replica decides about its logs and traces"
_SECRET = "a run file must not contain secrets; set HF_TOKEN in the generator's environment"

OPERATORS_ENGINE_ARGS = {
    "worker_cls": _CODE,
    "scheduler_cls": _CODE,
    "logits_processors": _CODE,
    "io_processor_plugin": _CODE,
    "reasoning_parser_plugin": _CODE,
    "distributed_executor_backend": _CODE,
    "kv_transfer_config": _CODE,
    "ec_transfer_config": _CODE,
    "ec_manager_config": _CODE,
    "kv_events_config": _MACHINE,
    "compilation_config": _CODE,
    "additional_config": _CODE,
    "profiler_config": _CODE,
    "logging_config": _CODE,
    "log_config_file": _CODE,
    "model_loader_extra_config": _CODE,
    "load_format": _CODE,
    "config_format": _CODE,
    "tokenizer_mode": _CODE,
    "model_impl": _CODE,
    "download_dir": _MACHINE,
    "otlp_traces_endpoint": _MACHINE,
    "device_ids": _MACHINE,
    "numa_bind": _MACHINE,
    "numa_bind_nodes": _MACHINE,
    "numa_bind_cpus": _MACHINE,
    "nnodes": _MACHINE,
    "node_rank": _MACHINE,
    "master_addr": _MACHINE,
    "master_port": _MACHINE,
    "data_parallel_size_local": _MACHINE,
    "data_parallel_address": _MACHINE,
    "data_parallel_rpc_port": _MACHINE,
    "data_parallel_backend": _MACHINE,
    "kv_offloading_backend": _MACHINE,
    "safetensors_load_strategy": _MACHINE,
    "safetensors_prefetch_num_threads": _MACHINE,
    "safetensors_prefetch_block_size": _MACHINE,
    "pt_load_map_location": _MACHINE,
    "shutdown_timeout": _MACHINE,
    "fail_on_environ_validation": _MACHINE,
    "ray_workers_use_nsight": _MACHINE,
    "log_level": _LOG,
    "aggregate_engine_logging": _LOG,
    "enable_log_requests": _LOG,
    "collect_detailed_traces": _LOG,
    "hf_token": _SECRET,
}
"""The same for arguments that only HEADRACE_ENGINE_ARGS may set."""


_OPERATORS_MAY = "the operator of the generators can set it in HEADRACE_ENGINE_ARGS"
_SPECULATION = {"spec_method": "method", "spec_model": "model"}


def why_not_in_a_run(name: str, args: Mapping[str, Any]) -> str | None:
    """Return why a run may not set the argument ``name`` to its value in ``args``; None if it may."""
    if name in OPERATORS_ENGINE_ARGS:
        return f"{OPERATORS_ENGINE_ARGS[name]}; {_OPERATORS_MAY}"
    if why := why_not_at_all(name, args):
        return why
    if name not in RUN_ENGINE_ARGS:
        known = [*RUN_ENGINE_ARGS, *RESERVED_ENGINE_ARGS, *OPERATORS_ENGINE_ARGS]
        return f"vLLM has no engine argument {name}{_near(name, known)}"
    if name in TABLES and args[name] is not None:
        return _why_not_this_table(name, args[name])
    if name in _SPECULATION:
        return _why_not_this_speculation({_SPECULATION[one]: args[one] for one in _SPECULATION if one in args})
    return None


def why_not_at_all(name: str, args: Mapping[str, Any]) -> str | None:
    """Return why neither a run nor an operator may set ``name`` to its value in ``args``; None if they may."""
    if name in RESERVED_ENGINE_ARGS:
        return RESERVED_ENGINE_ARGS[name]
    if name == "speculative_config" and isinstance(args[name], dict):
        for key, value in cast("dict[str, Any]", args[name]).items():
            if _as_vllm_reads(key) == "rejection_sample_method" and value == "synthetic":
                return f"{key}: {value} accepts drafts that the policy would not sample; leave it out"
    return None


def _why_not_this_table(name: str, table: Any) -> str | None:
    if not isinstance(table, dict):
        return f"it is a table of {', '.join(sorted(TABLES[name]))}"
    content = {_as_vllm_reads(key): value for key, value in cast("dict[str, Any]", table).items()}
    unlisted = sorted(content.keys() - TABLES[name])
    if unlisted:
        return f"a run may not set {', '.join(unlisted[:10])} of it{_near(unlisted[0], TABLES[name])}; {_OPERATORS_MAY}"
    return _why_not_this_speculation(content) if name == "speculative_config" else None


def _why_not_this_speculation(content: Mapping[str, Any]) -> str | None:
    """Return why a run may not set this method and model of speculative decoding; None if it may.

    Without a method, vLLM imports a model that is named like a Python class.
    """
    method, model = content.get("method"), content.get("model")
    if method is not None and not (isinstance(method, str) and method in SPECULATIVE_METHODS):
        return f"of its methods a run may use {', '.join(sorted(SPECULATIVE_METHODS))}; {_OPERATORS_MAY}"
    if method is None and model is not None and not _is_surely_a_model(model):
        return f"set a method too, such as draft_model: without it vLLM may take the model {model} for code to load"
    return None


def _is_surely_a_model(model: Any) -> bool:
    """Whether vLLM takes the value for a repository, a path, or no model at all, and never for a class."""
    return isinstance(model, str) and ("/" in model or model in MODEL_FREE_METHODS)


def _as_vllm_reads(key: str) -> str:
    """Return a key of speculative_config with underscores instead of hyphens, as vLLM reads it."""
    return key.replace("-", "_")


def _near(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def default_max_model_len(model: Mapping[str, Any]) -> int | None:
    """Return the most tokens that vLLM allows a prompt and its completion together by default; None if unknown.

    A scaled rotary embedding multiplies ``max_position_embeddings``, unless models with its method, such as longrope,
    state the product there.

    Args:
        model: The contents of config.json. A multimodal model has a table for its language model there.
    """
    for table in _tables(model):
        longest: Any = table.get("max_position_embeddings")
        if isinstance(longest, int) and longest > 0:
            return int(longest * _stretch(table))
    return None


def longrope_context(model: Mapping[str, Any]) -> int | None:
    """Return the number of tokens beyond which a model's rotary embedding has other frequencies; None without longrope.

    vLLM uses the frequencies of long texts for all tokens if ``max_model_len`` is larger than this. transformers uses
    them only in forward passes that are longer.

    Args:
        model: The contents of config.json.
    """
    for table in _tables(model):
        for scaling in _scalings(table):
            if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su"):
                name = "original_max_position_embeddings"
                original: Any = scaling.get(name) or table.get(name)
                return original if isinstance(original, int) and original > 0 else None
    return None


def _tables(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner: Any = model.get("text_config")
    return [cast("Mapping[str, Any]", inner), model] if isinstance(inner, dict) else [model]


def _stretch(table: Mapping[str, Any]) -> float:
    if "gemma3" in str(table.get("model_type")):  # states the stretched number too, with any method
        return 1.0
    factors = [
        factor
        for scaling in _scalings(table)
        if scaling.get("rope_type", scaling.get("type")) not in _STATED_STRETCHED
        and isinstance(factor := scaling.get("factor"), int | float)
        and 0 < factor < math.inf
    ]
    return factors[-1] if factors else 1.0


def _scalings(table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the rotary embedding: one table, or one for each kind of layer."""
    found: Any = table.get("rope_scaling") or table.get("rope_parameters")
    if isinstance(found, dict):
        scaling = cast("Mapping[str, Any]", found)
        yield scaling
        yield from (cast("Mapping[str, Any]", one) for one in scaling.values() if isinstance(one, dict))
