"""Hints for users of TRL: a replacement, or the reason, for each of TRL's options that a run does not have.

Every option of TRL's ``GRPOConfig`` is a setting of a run under the same name, or is in ELSEWHERE or ABSENT. The other
tables are about other classes of TRL and about vLLM. All tables are hints in error messages, and sections of
docs/run-file.md and docs/coming-from-trl.md. Tests in tests/conformance compare them with TRL.
"""

from collections.abc import Mapping

_BATCH = "a step trains groups_per_step groups of num_generations completions, in passes of max_tokens_per_microbatch"
_DTYPE = "set dtype: bfloat16 or dtype: float32"
_NODES = "set nproc_per_node and nnodes"
_LOG_LEVEL = "set HEADRACE_LOG_LEVEL for the trainer"
_TRACKIO = "set the variables that trackio reads, such as TRACKIO_SPACE_ID, in the trainer's environment"

ELSEWHERE: Mapping[str, str] = {
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": "generators batch the prompts of an evaluation themselves",
    "gradient_accumulation_steps": _BATCH,
    "auto_find_batch_size": "set max_tokens_per_microbatch",
    "torch_empty_cache_steps": "set max_tokens_per_microbatch",
    "generation_batch_size": "a batch has steps_per_generation times groups_per_step groups",
    "pad_to_multiple_of": "rows are not padded; with packing: false each row has one sequence",
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "tf32": _DTYPE,
    "bf16_full_eval": _DTYPE,
    "fp16_full_eval": _DTYPE,
    "vllm_gpu_memory_utilization": "set vllm: {gpu_memory_utilization: ...}",
    "vllm_tensor_parallel_size": "set vllm: {tensor_parallel_size: ...}",
    "vllm_max_model_length": "set max_prompt_length and max_completion_length, or vllm: {max_model_len: ...}",
    "model_name_or_path": "the setting is model",
    "model_init_kwargs": "dtype, attn_implementation and model_revision are separate settings",
    "run_name": "the setting is name",
    "warmup_ratio": "set warmup_steps, which below 1 is a share of the run's steps",
    "save_strategy": "checkpoints are written every save_steps optimizer steps",
    "eval_strategy": "set eval_steps, eval_on_start, or neither",
    "eval_delay": "set eval_steps, eval_on_start, or neither",
    "do_eval": "set eval_steps, eval_on_start, or neither",
    "logging_strategy": "set logging_steps",
    "logging_first_step": "set logging_steps; the run's own log has every step",
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
    "log_on_each_node": _LOG_LEVEL,
    "debug": _LOG_LEVEL,
    "disable_tqdm": "follow the run with `headrace watch`",
    "gradient_checkpointing_kwargs": "set gradient_checkpointing",
    "liger_kernel_config": "set use_liger_kernel",
    "use_cpu": "the trainer uses the GPUs it sees; hide them with CUDA_VISIBLE_DEVICES",
    "local_rank": _NODES,
    "accelerator_config": _NODES,
    "parallelism_config": _NODES,
    "deepspeed": "ranks share the model through FSDP2; set nproc_per_node and nnodes",
    "fsdp": "ranks share the model through FSDP2 by themselves; set nproc_per_node and nnodes",
    "fsdp_config": "set fsdp_reshard_after_forward",
    "ddp_timeout": "set HEADRACE_COLLECTIVE_TIMEOUT_S for the trainer",
    "data_seed": "seed is also the seed of the shuffling",
    "train_sampling_strategy": "set shuffle_dataset",
    "remove_unused_columns": "every column goes to the reward functions; choose some with columns",
    "hub_token": "set HF_TOKEN in the trainer's environment, or log in with `hf auth login`",
    "hub_strategy": "push_to_hub uploads the final model, once",
    "hub_always_push": "push_to_hub uploads the final model, once",
    "save_only_model": "`headrace export` makes a model directory from a checkpoint",
    "log_completions_hub_repo": "log_completions writes the table to rank.log and to the trackers in report_to",
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
}
"""TRL's option to the setting that does the same here."""

_ENGINE = "the generator is always vLLM; engine arguments of a run go into its table vllm, such as max_num_seqs"
_PLACE = "every run has its own directory, and resumes from its newest checkpoint by itself"
_LOADER = "prompts are encoded as they are admitted"
_DDP = "ranks share the model through FSDP2, and DDP is not used"
_EVALUATION = "an evaluation samples completions and scores them, as training does, and has no losses or labels"
_CONTINUOUS = "transformers' own generation is not used: the generator is always vLLM"
_SERVER = "generators join a run by themselves, through Redis"
_LABELS = "it is for training on given answers; a run trains on the model's own completions"

ABSENT: Mapping[str, str] = {
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_model_impl": "models run in vLLM's own implementation where it has one",
    "cache_implementation": _ENGINE,
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_group_port": _SERVER,
    "use_transformers_continuous_batching": _CONTINUOUS,
    "transformers_continuous_batching_config": _CONTINUOUS,
    "use_transformers_paged": _CONTINUOUS,
    "ds3_gather_for_generation": "the generator has its own weights, which the trainer pushes",
    "log_multimodal": "prompts are text",
    "output_dir": _PLACE,
    "overwrite_output_dir": _PLACE,
    "restore_callback_states_from_checkpoint": _PLACE,
    "save_on_each_node": _PLACE,
    "enable_jit_checkpoint": "a run that is asked to stop writes a checkpoint first",
    "disable_dropout": "every dropout is off, so that trainer and generator agree; lora_dropout is the exception",
    "neftune_noise_alpha": "noise in the trainer's embeddings would make it disagree with the generator",
    "optim_target_modules": "it is for the optimizers GaLore and APOLLO, which a run does not have",
    "average_tokens_across_devices": "the loss is always computed over the whole batch, on any number of ranks",
    "full_determinism": "which policy version samples a prompt depends on timing; seed fixes the order of the prompts",
    "trust_remote_code": "code of a model's repository is never run",
    "use_cache": "the trainer's passes need no cache of keys and values",
    "dataloader_num_workers": _LOADER,
    "dataloader_drop_last": _LOADER,
    "dataloader_in_order": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "length_column_name": _LOADER,
    "ddp_backend": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_find_unused_parameters": _DDP,
    "ddp_static_graph": _DDP,
    "do_train": "a run trains",
    "do_predict": "a run trains; the generator answers as an OpenAI API",
    "batch_eval_metrics": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "label_names": _LABELS,
    "label_smoothing_factor": _LABELS,
    "hub_revision": "the model is uploaded to the repository's main branch",
    "include_num_input_tokens_seen": "num_tokens is always logged",
    "skip_memory_metrics": "memory is always logged",
    "logging_nan_inf_filter": "a loss that is not finite ends the run, and the batch is kept",
}
"""TRL's option to the reason why a run has no such option."""

_DATASET = "set dataset_name: a file, or a Hugging Face dataset id; for objects in memory, write them to a file first"
_TOKENIZER = "the tokenizer is loaded from the model's directory or repository; put another one there"
_CALLBACKS = (
    "follow the run with `headrace watch`, GET /v1/runs/RUN/events, or a tracker in report_to; instead of "
    "EarlyStoppingCallback, set early_stopping_patience"
)
_LAUNCH = "it is an option of TRL's launcher; set nproc_per_node and nnodes"
_EXPERTS = "the generator serves adapters of linear layers only; name them in lora_target_modules"
_DORA = "vLLM does not serve DoRA; set use_rslora: true, or leave use_peft out to train all weights"
_SAVED = "vLLM serves no trained layers beside an adapter; leave use_peft out to train all weights"
_PUSHES = "weights are pushed to the generators after each batch; push_timeout_s is the deadline of a push"
_REQUESTS = "prompts reach the generators through Redis, and a generator that is gone is replaced by others"

OF_THE_CONSTRUCTOR: Mapping[str, str] = {
    "args": "write the options of GRPOConfig as keys of the run file itself",
    "train_dataset": _DATASET,
    "eval_dataset": "set eval_dataset_name, or dataset_test_split, and eval_steps",
    "processing_class": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "reward_processing_classes": "a reward model is loaded with its own tokenizer",
    "callbacks": _CALLBACKS,
    "optimizers": "set optim, optim_args, learning_rate, lr_scheduler_type and weight_decay",
    "quantization_config": "set load_in_4bit: true with use_peft: true",
    "peft_config": "set use_peft: true and lora_r, lora_alpha, lora_target_modules",
    "rollout_func": "write it as an agent program, which plays one rollout: agent: my_agent:run",
}
"""Arguments of ``GRPOTrainer`` that are not settings of a run."""

OF_OTHER_CONFIGS: Mapping[str, str] = {
    # GRPOScriptArguments and DatasetMixtureConfig
    "reward_model_name_or_path": "put the reward model's name or directory into reward_funcs",
    "streaming": "the data sets of a mixture are read whole; dataset_streaming is for a single one",
    "test_split_size": "write the rows to evaluate on to another file, and set eval_dataset_name",
    "ignore_bias_buffers": _DDP,
    # ModelConfig
    "lora_target_parameters": _EXPERTS,
    "lora_modules_to_save": _SAVED,
    "use_dora": _DORA,
    "lora_task_type": "the model is always a causal language model",
    "load_in_8bit": "set load_in_4bit: true, or leave it out",
    "bnb_4bit_quant_type": "load_in_4bit always uses nf4",
    "use_bnb_nested_quant": "load_in_4bit always quantises its constants too",
    "bnb_4bit_quant_storage": "load_in_4bit stores its weights as bitsandbytes does by default",
    "torch_dtype": _DTYPE,
    # AsyncGRPOConfig
    "fork_threshold_tokens": "each turn is trained with the exact tokens that were sampled, so nothing is re-tokenized",
    "request_timeout": _REQUESTS,
    "heartbeat_stale_after_s": _REQUESTS,
    "weight_sync_timeout": _PUSHES,
    "weight_sync_steps": f"{_PUSHES}; a batch has steps_per_generation times num_iterations optimizer steps",
    "token_budget": "the setting is max_tokens_per_microbatch",
    "max_inflight_tasks": "the setting is max_inflight_groups, which counts prompts and not completions",
    "queue_maxsize": "max_staleness and groups_per_step bound the number of groups in flight",
    # The launcher
    "accelerate_config": _LAUNCH,
    "num_processes": _LAUNCH,
    "num_machines": _LAUNCH,
}
"""Options of TRL's other classes that are not settings of a run."""

INSTEAD_IN_DATASETS: Mapping[str, str] = {
    "data_files": "give the file itself as path",
    "data_dir": "give the file or the data set itself as path",
}
"""Options of TRL's ``DatasetConfig`` that an entry of ``datasets`` does not have."""

OF_VLLM: Mapping[str, str] = {
    "stop": "set generation_kwargs: {stop: [...]}",
    "structured_outputs": "set vllm_structured_outputs_regex or generation_kwargs: {structured_outputs: {...}}",
    "tensor_parallel_size": _ENGINE,
    "speculative_config": _ENGINE,
    "quantization": _ENGINE,
    "max_num_seqs": _ENGINE,
    "gpu_memory_utilization": _ENGINE,
}
"""Options that vLLM's users may write outside the tables for vLLM's arguments."""

INSTEAD: Mapping[str, str] = {**OF_VLLM, **OF_OTHER_CONFIGS, **OF_THE_CONSTRUCTOR, **ELSEWHERE, **ABSENT}
"""Every setting that a run does not have, to a clause that follows "there is no such setting; "."""
