"""The options of ``trl grpo --config`` in TRL 1.16, with their defaults.

They are the fields of ``GRPOConfig``, ``GRPOScriptArguments``, ``ModelConfig`` and ``DatasetMixtureConfig``. TRL is not
needed to read its files. A test in tests/conformance compares this table with TRL.
"""

from collections.abc import Mapping
from typing import Any, Final

_NULL: Final = """
    output_dir lr_scheduler_kwargs optim_args optim_target_modules bf16 tf32 gradient_checkpointing_kwargs
    torch_compile_backend torch_compile_mode liger_kernel_config neftune_noise_alpha torch_empty_cache_steps
    disable_tqdm run_name trackio_space_id trackio_bucket_id trackio_static_space_id eval_steps
    eval_accumulation_steps save_total_limit hub_token hub_private_repo hub_model_id hub_revision
    metric_for_best_model greater_is_better data_seed accelerator_config parallelism_config
    dataloader_prefetch_factor dataloader_multiprocessing_context label_names ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend fsdp fsdp_config deepspeed
    resume_from_checkpoint model_init_kwargs router_aux_loss_coef num_generations_eval generation_batch_size
    steps_per_generation min_p generation_kwargs chat_template_kwargs cache_implementation
    vllm_structured_outputs_regex vllm_server_base_url vllm_max_model_length delta epsilon_high reward_weights
    max_tool_calling_iterations vllm_importance_sampling_clip_min off_policy_mask_threshold
    num_completions_to_print log_completions_hub_repo transformers_continuous_batching_config
    vllm_importance_sampling_cap dataset_name dataset_config reward_model_name_or_path reward_funcs
    model_name_or_path attn_implementation lora_target_modules lora_target_parameters lora_modules_to_save
    bnb_4bit_quant_storage test_split_size
"""
_FALSE: Final = """
    fp16 bf16_full_eval fp16_full_eval torch_compile use_liger_kernel use_cache auto_find_batch_size
    logging_first_step prediction_loss_only eval_on_start eval_use_gather_object batch_eval_metrics
    save_only_model save_on_each_node enable_jit_checkpoint push_to_hub hub_always_push load_best_model_at_end
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism use_cpu dataloader_drop_last
    dataloader_persistent_workers remove_unused_columns do_train do_eval do_predict trust_remote_code
    disable_dropout cast_lm_head_to_fp32 use_vllm vllm_enable_sleep_mode mask_truncated_completions sync_ref_model
    use_adaptive_entropy log_completions log_unique_prompts use_transformers_continuous_batching
    use_transformers_paged dataset_streaming ignore_bias_buffers use_peft use_rslora use_dora load_in_8bit
    load_in_4bit use_bnb_nested_quant streaming
"""
_TRUE: Final = """
    average_tokens_across_devices gradient_checkpointing log_on_each_node logging_nan_inf_filter
    eval_do_concat_batches dataloader_pin_memory dataloader_in_order skip_memory_metrics ds3_gather_for_generation
    shuffle_dataset vllm_importance_sampling_correction use_bias_correction_kl log_multimodal
"""
_OTHERS: Final[Mapping[str, Any]] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-06,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "logging_strategy": "steps",
    "logging_steps": 10,
    "include_num_input_tokens_seen": "no",
    "log_level": "passive",
    "log_level_replica": "warning",
    "report_to": "none",
    "project": "huggingface",
    "eval_strategy": "no",
    "eval_delay": 0,
    "per_device_eval_batch_size": 8,
    "include_for_metrics": [],
    "save_strategy": "steps",
    "save_steps": 500,
    "hub_strategy": "every_save",
    "seed": 42,
    "dataloader_num_workers": 0,
    "train_sampling_strategy": "random",
    "length_column_name": "length",
    "ddp_timeout": 1800,
    "debug": "",
    "local_rank": -1,
    "num_generations": 8,
    "max_completion_length": 512,
    "pad_to_multiple_of": "auto",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "beta": 0.0,
    "num_iterations": 1,
    "epsilon": 0.2,
    "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
    "entropy_target": 0.2,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "model_revision": "main",
    "dtype": "float32",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_task_type": "CAUSAL_LM",
    "bnb_4bit_quant_type": "nf4",
    "datasets": [],
}

TRL_DEFAULTS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(_NULL.split()),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(_TRUE.split(), True),
    **_OTHERS,
}
