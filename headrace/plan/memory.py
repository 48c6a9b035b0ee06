"""Computes the GPU memory of trainer and generator, and the disk space of checkpoints, part by part. Pure.

docs/operations.md has the formulas, with these letters:

P  parameters   A  parameters of adapters   N  training ranks   t  GPUs that hold a replica's weights once
b  bytes of a number in `dtype`
"""

from headrace.byte_size import sized
from headrace.plan.rows import Row
from headrace.plan.workload import Workload
from shared.run_options.run_config import RunConfig

TRAINER, GENERATOR, DISK = "trainer, each GPU", "generator, each GPU", "disk"
MASTER, _GRADIENT, _REFERENCE = 4, 4, 4
"""Bytes per parameter: everything that is trained is float32 (policy_model.py)."""
_NF4_BITS = 4.127
"""Bits per weight with double quantisation: arXiv 2305.14314, section 3."""
_UTILIZATION = 0.92
"""vLLM 0.32's default of gpu_memory_utilization."""
_NUM_SEQS, _NUM_SEQS_OF_LARGE_GPU, _LARGE_GPU_BYTES = 256, 1024, 70 << 30
"""vLLM 0.32's defaults of max_num_seqs (get_batch_defaults). An A100 of 80 GB has the smaller one there."""
_LEFT_FREE_BYTES = 1 << 30
"""staged_weights.py leaves this free, beside the largest parameter."""
_FULL_SHARE, _AIM = 0.9, 0.8
"""inflight_window.py: HIGH and AIM."""
_NO_SHAPE = "give --model: its config.json has the numbers of layers and heads"


def saved_bytes(config: RunConfig) -> int:
    """Return the bytes of one trained parameter in a checkpoint: its float32 master weight and its moments."""
    return MASTER + config.moment_bytes()


def trainer_rows(work: Workload) -> list[Row]:
    """Return the rows on one training rank's GPU memory, and on its main memory while it writes a checkpoint."""
    config, ranks, count = work.config, work.trainer_gpus, work.num_parameters
    over = f" / {ranks} ranks" if ranks > 1 else ""
    if config.use_peft:
        rows = _adapter_rows(work, over)
    else:
        rows = [
            _row("weights", MASTER * count / ranks, f"4 bytes x {count:,} parameters, float32{over}"),
            _row("gradients", _GRADIENT * count / ranks, f"4 bytes x parameters, float32{over}"),
            _row(
                "moments",
                config.moment_bytes() * count / ranks,
                f"{config.moment_bytes()} bytes x parameters, as optim is {config.optim}{over}",
            ),
        ]
        if config.beta:
            rows.append(
                _row("reference", _REFERENCE * count / ranks, f"4 bytes x parameters, because beta is set{over}")
            )
    rows += _gathered(work) + _activations(work)
    total = sum(row.value or 0.0 for row in rows)
    rows.append(_total(TRAINER, "in all, at least", total, work))
    saved = work.adapter_parameters if config.use_peft else count
    if saved is not None:
        rows.append(
            Row(
                TRAINER,
                "main memory for checkpoints",
                saved_bytes(config) * saved / ranks,
                "bytes",
                f"{saved_bytes(config)} bytes x trained parameters{over}",
            )
        )
    return rows


def generator_rows(work: Workload) -> list[Row]:
    """Return the rows on the memory of one GPU of a generator replica, and on the number of sequences that fit."""
    gpus, weights = work.engine.gpus_of_a_model, _served_bytes(work)
    over = f" / {gpus} GPUs" if gpus > 1 else ""
    how = f"{weights * gpus / work.num_parameters:.3g} bytes x parameters{over}"
    return [_row("weights", weights, how, GENERATOR), *_kv_rows(work), *_staging(work), *_room(work)]


def disk_rows(work: Workload) -> list[Row]:
    """Return the rows on the disk space of one checkpoint and of all that a run keeps; empty if its size is unknown."""
    config = work.config
    saved = work.adapter_parameters if config.use_peft else work.num_parameters
    if saved is None:
        return []
    one = saved_bytes(config) * saved + (_REFERENCE * saved if config.sync_ref_model else 0)
    return [
        Row(
            DISK,
            "a checkpoint",
            one,
            "bytes",
            f"{saved_bytes(config)} bytes x trained parameters: float32 weights, and moments",
        ),
        Row(
            DISK,
            "all of a run's",
            one * (config.save_total_limit + (2 if config.finds_best else 1)),
            "bytes",
            f"save_total_limit={config.save_total_limit}, {'the best ' if config.finds_best else ''}and the one being "
            "written; logs and model come on top",
        ),
    ]


def groups_that_fit(work: Workload) -> tuple[float, float] | None:
    """Return how many groups (at least 1) a replica decodes at once, at full and at mean length; None if unknown."""
    free, per_token = _room_bytes(work), _bytes_per_token(work)
    if free is None or per_token is None or work.completion_tokens is None:
        return None
    room = free / per_token
    config, prompt = work.config, work.prompt_tokens or 0.0
    longest = (config.max_prompt_length or prompt) + config.num_generations * config.max_completion_length
    mean = prompt + config.num_generations * work.completion_tokens
    most = config.max_inflight_groups
    engines = work.engine.data_parallel
    decoded = engines * _num_seqs(work) // config.num_generations
    full, usual = engines * (_FULL_SHARE * room // longest), engines * (_AIM * room // mean)
    return max(1.0, min(most, decoded, full)), max(1.0, min(most, decoded, usual))


def _adapter_rows(work: Workload, over: str) -> list[Row]:
    config, ranks = work.config, work.trainer_gpus
    base = _nf4_bytes(work) if config.load_in_4bit else work.dtype_bytes * work.num_parameters
    rows = [_row("frozen base", base / ranks, f"{base / work.num_parameters:.3g} bytes x parameters{over}")]
    adapters = work.adapter_parameters
    if adapters is None:
        how = "bytes x their parameters, which are not counted with lora_target_modules or experts"
        return [*rows, Row(TRAINER, "adapters", None, "bytes", _NO_SHAPE if work.shape is None else how)]
    each = MASTER + _GRADIENT + config.moment_bytes()
    how = f"{each} bytes x {adapters:,} parameters (r x (in + out) of every linear layer){over}"
    return [*rows, _row("adapters: weights, gradients, moments", each * adapters / ranks, how)]


def _activations(work: Workload) -> list[Row]:
    if not work.config.gradient_checkpointing:
        return []
    if work.shape is None:
        return [Row(TRAINER, "activations, at least", None, "bytes", _NO_SHAPE)]
    number = _number_bytes(work)
    kept = number * work.shape.num_layers * work.config.max_tokens_per_microbatch * work.shape.hidden_size
    how = (
        f"{number} bytes x layers x max_tokens_per_microbatch x hidden size, kept between layers; others come on top: "
    )
    return [_row("activations, at least", kept, how + "memory/device_peak_bytes of a run shows how much")]


def _number_bytes(work: Workload) -> int:
    """Return the bytes of a number in the embeddings, and so in the tensors between layers: float32 if trained."""
    return work.dtype_bytes if work.config.use_peft else MASTER


def _gathered(work: Workload) -> list[Row]:
    shape = work.shape
    if work.trainer_gpus > 1 and shape is None:
        return [Row(TRAINER, "gathered by FSDP", None, "bytes", _NO_SHAPE)]
    if work.trainer_gpus > 1 and shape is not None and shape.num_layer_parameters is not None:
        number = _number_bytes(work)
        held = number * shape.num_embedding_parameters + 2 * work.dtype_bytes * shape.num_layer_parameters
        how = f"{number} bytes x embeddings and last projection, {work.dtype_bytes} bytes x two layers"
        return [_row("gathered by FSDP", held, how)]
    if work.trainer_gpus == 1 and work.config.dtype == "bfloat16" and not work.config.use_peft:
        return [
            _row(
                "bfloat16 copies, at most",
                2 * work.num_parameters,
                "2 bytes x parameters: autocast keeps casts of weights for a pass",
            )
        ]
    return []


def _kv_rows(work: Workload) -> list[Row]:
    config, shape, engine = work.config, work.shape, work.engine
    per_token, longest = _bytes_per_token(work), _longest_sequence(work)
    if shape is None or per_token is None:
        return [Row(GENERATOR, "KV cache of a token", None, "bytes", _NO_SHAPE)]
    layers = -(-shape.num_attention_layers // engine.pipeline_parallel)
    heads = -(-shape.num_kv_heads // engine.tensor_parallel)
    how = f"2 x {layers} layers x {heads} heads x {shape.head_dim} x {_kv_bytes(work)} bytes"
    prompt = "" if config.max_prompt_length else ", its prompt not counted: set max_prompt_length"
    return [
        _row("KV cache of a token", per_token, how, GENERATOR),
        _row("KV cache of the longest sequence", per_token * longest, f"x {longest:,} tokens{prompt}", GENERATOR),
    ]


def staged_bytes(work: Workload) -> tuple[float, bool | None] | None:
    """Return the bytes of weights that a vLLM worker stages, and whether they fit on its GPU (None: unknown).

    Returns None if nothing is staged, or if the size of the adapters is unknown. Adapters are always staged in main
    memory, because vLLM loads them from files.
    """
    if work.config.use_peft:
        adapters = work.adapter_parameters
        return None if adapters is None else (work.dtype_bytes * adapters, False)
    if work.config.push_staging == "none":
        return None
    num_bytes = work.dtype_bytes * work.num_parameters
    if work.gpu_bytes is None:
        return num_bytes, None
    largest = 0 if work.shape is None else work.dtype_bytes * work.shape.vocab_size * work.shape.hidden_size
    return num_bytes, num_bytes + largest + _LEFT_FREE_BYTES <= (1.0 - _utilization(work)) * work.gpu_bytes


def _staging(work: Workload) -> list[Row]:
    staged = staged_bytes(work)
    if staged is None:
        return []
    num_bytes, fits = staged
    how = f"{work.dtype_bytes} bytes x pushed parameters, all of them in every worker"
    if work.config.use_peft:
        how += ", in main memory: vLLM loads adapters from files"
    elif work.gpu_bytes is not None:
        beside = (1.0 - _utilization(work)) * work.gpu_bytes
        how += (
            f"; fits beside the engine's {_utilization(work):.0%}"
            if fits
            else f"; {sized(beside)} are left beside the engine's {_utilization(work):.0%}: kept in main memory"
        )
    return [_row("staged weights", num_bytes, how, GENERATOR)]


def _room(work: Workload) -> list[Row]:
    room, per_token, longest, config = _room_bytes(work), _bytes_per_token(work), _longest_sequence(work), work.config
    if work.gpu_bytes is None or room is None:
        return [Row(GENERATOR, "sequences that fit", None, "", "give --gpu-gib")]
    share = f"{_utilization(work):.2f} of {sized(work.gpu_bytes)} less weights"
    share += f" and {sized(work.engine_bytes)}" if work.engine_bytes else (
        "; vLLM's other memory is not counted: its log says `Available KV cache memory`, or give --engine-gib"
    )  # fmt: skip
    if room <= 0:
        return [Row(GENERATOR, "KV cache", room, "bytes", f"{share}: does not fit; use more GPUs a replica", True)]
    if per_token is None:
        tokens_row = Row(GENERATOR, "tokens in it", None, "tokens", _NO_SHAPE)
        return [_row("KV cache, at most", room, share, GENERATOR), tokens_row]
    tokens = room / per_token
    rows = [
        _row("KV cache, at most", room, share, GENERATOR),
        Row(GENERATOR, "tokens in it", float(int(tokens)), "tokens", "KV cache / KV cache of a token"),
        Row(
            GENERATOR, "sequences at full length", float(int(tokens // longest)), "sequences", f"/ {longest:,} tokens",
            is_warning=tokens < longest,
        ),
    ]  # fmt: skip
    fit = groups_that_fit(work)
    engines = f" x {work.engine.data_parallel} engines" if work.engine.data_parallel > 1 else ""
    if fit is None:
        rows.append(Row(GENERATOR, "groups in flight", None, "groups", "give --completion-tokens, or --from-run"))
        return rows
    rows.append(
        Row(
            GENERATOR, "groups in flight", fit[1], "groups",
            f"0.8 x tokens / (prompt + {config.num_generations} completions of mean length){engines}, at most "
            f"max_inflight_groups={config.max_inflight_groups} and what max_num_seqs={_num_seqs(work)} decodes; "
            f"{fit[0]:.0f} if all were of full length",
        )
    )  # fmt: skip
    return rows


def _served_bytes(work: Workload) -> float:
    """Return the bytes of weights on one GPU of a generator replica."""
    is_4bit = work.config.use_peft and work.config.load_in_4bit
    whole = _nf4_bytes(work) if is_4bit else work.dtype_bytes * work.num_parameters
    return whole / work.engine.gpus_of_a_model


def _room_bytes(work: Workload) -> float | None:
    """Return the bytes of a generator's GPU that are left for the KV cache; None if its memory is unknown."""
    if work.gpu_bytes is None:
        return None
    return _utilization(work) * work.gpu_bytes - _served_bytes(work) - (work.engine_bytes or 0.0)


def _longest_sequence(work: Workload) -> int:
    return (work.config.max_prompt_length or 0) + work.config.max_completion_length


def _bytes_per_token(work: Workload) -> int | None:
    if work.shape is None:
        return None
    numbers = work.shape.kv_numbers_per_token(
        tensor_parallel=work.engine.tensor_parallel, pipeline_parallel=work.engine.pipeline_parallel
    )
    return _kv_bytes(work) * numbers


def _nf4_bytes(work: Workload) -> float:
    """Return the bytes of the base model in 4 bits. Embeddings and the last projection keep `dtype`."""
    kept = 0 if work.shape is None else work.shape.num_embedding_parameters
    return (work.num_parameters - kept) * _NF4_BITS / 8 + kept * work.dtype_bytes


def _kv_bytes(work: Workload) -> int:
    return 1 if str(work.config.vllm.get("kv_cache_dtype", "auto")).startswith("fp8") else work.dtype_bytes


def _num_seqs(work: Workload) -> int:
    """Return vLLM's max_num_seqs: how many sequences one engine decodes at once."""
    is_large = work.gpu_bytes is not None and work.gpu_bytes >= _LARGE_GPU_BYTES
    return int(work.config.vllm.get("max_num_seqs") or (_NUM_SEQS_OF_LARGE_GPU if is_large else _NUM_SEQS))


def _utilization(work: Workload) -> float:
    return float(work.config.vllm.get("gpu_memory_utilization", _UTILIZATION))


def _total(section: str, name: str, value: float, work: Workload) -> Row:
    if work.gpu_bytes is None:
        return Row(section, name, value, "bytes", "the sum; give --gpu-gib to see whether it fits")
    fits = value <= work.gpu_bytes
    return Row(
        section, name, value, "bytes",
        f"the sum; a GPU has {sized(work.gpu_bytes)}" + ("" if fits else ": does not fit, use more ranks, or LoRA"),
        is_warning=not fits,
    )  # fmt: skip


def _row(name: str, value: float, how: str, section: str = TRAINER) -> Row:
    return Row(section, name, value, "bytes", how)
