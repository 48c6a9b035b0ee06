"""The vLLM engine arguments that a run file's `vllm:` section may set: in vLLM 0.32, none of them loads code or files.

Every other name is refused (engine_args.py), and so are the new arguments of a later vLLM until they are checked.
tests/generator/engine/test_engine_arg_names.py compares with vLLM. The lists are grouped as vLLM's are.
"""

from typing import Final

RUN_ENGINE_ARGS: Final = frozenset({
    "enable_return_routed_experts", "served_model_name", "kv_cache_dtype", "max_model_len",
    "cudagraph_capture_sizes", "max_cudagraph_capture_size", "ir_op_priority", "pipeline_parallel_size",
    "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "tensor_parallel_size",
    "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_comm_backend", "dcp_q_replicate",
    "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "data_parallel_size", "enable_hc_sp",
    "enable_expert_parallel", "enable_batch_sharded_sampling", "enable_ep_weight_filter", "moe_backend",
    "linear_backend", "sparse_indexer_topk_backend", "all2all_backend", "enable_dbo", "ubatch_size",
    "dbo_decode_token_threshold", "dp_sync_interval", "dbo_prefill_token_threshold",
    "disable_nccl_for_dp_synchronization", "eplb_config", "enable_eplb", "expert_placement_strategy",
    "max_parallel_loading_workers", "block_size", "enable_prefix_caching", "prefix_caching_hash_algo",
    "prefix_cache_retention_interval", "disable_sliding_window", "disable_cascade_attn", "offload_backend",
    "cpu_offload_gb", "cpu_offload_params", "offload_group_size", "offload_num_in_group", "offload_prefetch_step",
    "offload_params", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_batched_tokens",
    "max_num_scheduled_tokens", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "max_num_seqs", "max_num_active_seqs", "max_logprobs", "use_fp64_gumbel", "quantization", "quantization_config",
    "allow_deprecated_quantization", "enforce_eager", "disable_custom_all_reduce", "enable_shm_tensor_arena",
    "renderer_num_workers", "fully_sharded_loras", "lora_dtype", "specialize_active_lora",
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "num_gpu_blocks_override", "ignore_patterns",
    "enable_chunked_prefill", "scheduler_reserve_full_isl", "prefill_schedule_interval", "watermark",
    "disable_hybrid_kv_cache_manager", "structured_outputs_config", "aux_output_config", "reasoning_parser",
    "speculative_config", "spec_method", "spec_model", "spec_tokens", "show_hidden_metrics_for_version",
    "per_request_spec_decode_metrics", "kv_cache_metrics", "kv_cache_metrics_sample", "custom_histogram_buckets",
    "cudagraph_metrics", "enable_layerwise_nvtx_tracing", "enable_mfu_metrics", "enable_logging_iteration_details",
    "jit_monitor_mode", "jit_monitor_verbose", "attention_config", "engram_config", "mamba_config", "kernel_config",
    "enable_flashinfer_autotune", "reasoning_config", "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names", "enable_cumem_allocator", "enable_nccl_comm_suspend", "attention_backend",
    "kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_block_size",
    "prefix_match_unit", "mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len",
    "use_replayssm", "mamba_backend", "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds", "use_tqdm_on_load", "async_scheduling", "stream_interval", "kv_sharing_fast_prefill",
    "swa_bounded_replay", "optimization_level", "performance_mode", "kv_offloading_size", "gdn_prefill_backend",
    "kda_prefill_backend", "kda_decode_backend",
})  # fmt: skip
"""Arguments of AsyncEngineArgs."""

TABLES: Final = {
    "structured_outputs_config": frozenset({
        "backend", "disable_any_whitespace", "disable_additional_properties", "reasoning_parser",
        "enable_in_reasoning",
    }),
    "speculative_config": frozenset({
        "enforce_eager", "num_speculative_tokens", "model", "method", "draft_tensor_parallel_size",
        "tensor_parallel_size", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "max_model_len",
        "revision", "index_share_for_mtp_iteration", "disable_padded_drafter_batch", "disable_eagle_block_drop",
        "use_local_argmax_reduction", "use_heterogeneous_vocab", "prompt_lookup_max", "prompt_lookup_min",
        "parallel_drafting", "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
        "rejection_sample_method", "draft_sample_method", "dspark_draft_topk", "enable_adaptive_verification",
    }),
    "attention_config": frozenset({
        "backend", "minimax_m3_msa_decode_backend", "backend_per_kind", "flash_attn_version",
        "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
        "use_trtllm_attention", "disable_flashinfer_q_quantization", "mla_prefill_backend",
        "use_prefill_query_quantization", "indexer_kv_dtype", "indexer_sparse_logits", "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    }),
    "eplb_config": frozenset({
        "window_size", "step_interval", "num_redundant_experts", "log_balancedness", "log_balancedness_interval",
        "use_async", "policy", "communicator", "enable_migration_batching",
    }),
    "kernel_config": frozenset({
        "ir_op_priority", "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune",
        "enable_cutedsl_warmup", "enable_jit_warmup", "moe_backend", "sparse_indexer_topk_backend", "linear_backend",
        "linear_backend_per_quant",
    }),
    "ir_op_priority": frozenset({
        "rms_norm", "fused_add_rms_norm", "gelu_and_mul_sparse",
    }),
    "mamba_config": frozenset({
        "backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds", "ssu_algorithm",
    }),
    "engram_config": frozenset({
        "cpu_offload", "embedding_across_dp", "dp_shared_memory", "use_thp",
    }),
    "aux_output_config": frozenset({
        "enable_return_routed_experts", "max_bytes",
    }),
    "reasoning_config": frozenset({
        "reasoning_parser", "reasoning_start_str", "reasoning_end_str",
    }),
    "quantization_config": frozenset({
        "linear", "moe", "ignore", "targets",
    }),
}  # fmt: skip
"""Keys of the arguments that are tables. vLLM's configs have more keys, which name code or files."""

SPECULATIVE_METHODS: Final = frozenset({
    "ngram", "ngram_gpu", "suffix", "draft_model", "medusa", "mlp_speculator", "eagle", "eagle3", "dflash", "dspark",
    "mtp", "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp",
    "glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp",
    "qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp",
    "bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp",
    "inkling_mtp", "glm5_next_mtp",
})  # fmt: skip
"""Methods of speculative_config that load no code. Drafts come from a model's weights or from the text itself."""

MODEL_FREE_METHODS: Final = frozenset({"ngram", "[ngram]"})
"""Values that vLLM takes for a method if they are given as the model."""
