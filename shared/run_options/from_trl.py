"""What to write instead of options that TRL's users know and a run does not have."""

_BATCH = "a step trains groups_per_step groups of num_generations completions, in passes of max_tokens_per_microbatch"
_ENGINE = "the generator is vLLM always, with its own options in HEADRACE_ENGINE_ARGS"
_DTYPE = "say dtype: bfloat16 or dtype: float32"
_PLACE = "every run has a directory of its own, and goes on from its newest checkpoint by itself"

INSTEAD = {
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "generation_batch_size": "a batch has steps_per_generation times groups_per_step groups",
    "auto_find_batch_size": "set max_tokens_per_microbatch",
    "bf16": _DTYPE,
    "fp16": _DTYPE,
    "tf32": _DTYPE,
    "use_vllm": _ENGINE,
    "vllm_mode": _ENGINE,
    "vllm_gpu_memory_utilization": _ENGINE,
    "vllm_tensor_parallel_size": _ENGINE,
    "vllm_max_model_length": _ENGINE,
    "vllm_server_base_url": _ENGINE,
    "cache_implementation": _ENGINE,
    "generation_kwargs": "temperature, top_p, top_k, min_p and repetition_penalty are settings of their own",
    "model_name_or_path": "the setting is model",
    "model_init_kwargs": "dtype, attn_implementation and model_revision are settings of their own",
    "output_dir": _PLACE,
    "overwrite_output_dir": _PLACE,
    "resume_from_checkpoint": _PLACE,
    "run_name": "the setting is name",
    "save_strategy": "checkpoints are written every save_steps optimizer steps",
    "eval_strategy": "set eval_steps, eval_on_start, or neither",
    "logging_strategy": "set logging_steps",
    "warmup_ratio": "set warmup_steps, in optimizer steps",
    "disable_dropout": "every dropout is off, so that trainer and generator agree; lora_dropout is the exception",
    "deepspeed": "ranks share the model through FSDP2; set nproc_per_node and nnodes",
    "fsdp": "ranks share the model through FSDP2 by themselves; set nproc_per_node and nnodes",
    "fsdp_config": "set fsdp_reshard_after_forward",
    "use_cpu": "the trainer uses the GPUs it sees; hide them with CUDA_VISIBLE_DEVICES",
    "optim": "the optimizer is AdamW",
    "peft_config": "set use_peft: true and lora_r, lora_alpha, lora_target_modules",
    "trust_remote_code": "code of a model's repository is never run",
    "hub_token": "set HF_TOKEN in the trainer's environment, or log in with `hf auth login`",
    "remove_unused_columns": "every column goes to the reward functions; choose some with columns",
    "dataloader_num_workers": "prompts are encoded as they are admitted",
}
"""TRL's option to a clause that follows "there is no such setting; "."""
