"""The steps of the first hour on GPUs, the likeliest failures first."""

from dataclasses import dataclass

_PYTEST = ("pytest", "-v", "-m", "gpu")
_ENGINE_OPTIONS = "tests/generator/engine/test_options_on_gpu.py"
_MANY_PUSHES = "tests/weights/test_many_pushes_on_gpu.py"
_TRAINER_NUMBERS = ("tokens_per_s", "throughput_ratio", "throughput_ratio_with_old_logprob_pass", "mfu")


@dataclass(frozen=True)
class Step:
    """One command, and the conditions under which it can run.

    Attributes:
        name: Names the step's files too.
        shows: What a pass shows.
        module: Arguments of ``python -m``. The tests of pytest are counted; other modules end their output with a line
            of JSON.
        num_gpus: GPUs that it uses.
        gpu_gib: Memory that must be free on each of them, in GiB.
        packages: Distributions that must be installed.
        numbers: Keys of the line of JSON that the report shows.
        minutes: Time after which it is ended.
    """

    name: str
    shows: str
    module: tuple[str, ...]
    num_gpus: int = 1
    gpu_gib: float = 8.0
    packages: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    minutes: float = 10.0


STEPS = (
    Step(
        "nccl",
        "the trainer's NCCL calls reach a generator's worker on another GPU; a missing peer costs a deadline",
        (*_PYTEST, "tests/weights/test_nccl.py"),
        num_gpus=2,
        packages=("vllm",),
    ),
    Step(
        "ipc-sleep",
        "another process reads the trainer's GPU buffer; an engine sleeps, and wakes with its memory",
        (*_PYTEST, "tests/weights/test_ipc_gpu.py"),
        gpu_gib=16.0,
        packages=("vllm",),
    ),
    Step(
        "staging",
        "main memory is page-locked for staged weights, and copied to the GPU",
        (*_PYTEST, "tests/generator/worker/test_staging_memory.py"),
        packages=("vllm",),
    ),
    Step(
        "checkpoint-copy",
        "main memory is page-locked for checkpoints, and copied from the GPU",
        (*_PYTEST, "tests/trainer/checkpoints/test_copy_memory.py"),
    ),
    Step(
        "pushes-ipc",
        "200 pushes under load within one GPU: every token is of the version that it names",
        (*_PYTEST, f"{_MANY_PUSHES}::test_over_ipc"),
        gpu_gib=16.0,
        packages=("vllm",),
    ),
    Step(
        "pushes-nccl",
        "the same from one GPU to another over NCCL",
        (*_PYTEST, f"{_MANY_PUSHES}::test_over_nccl"),
        num_gpus=2,
        packages=("vllm",),
    ),
    Step(
        "engine-tp2",
        "an engine on two GPUs samples from the policy",
        (*_PYTEST, "-k", "tensor_parallel", _ENGINE_OPTIONS),
        num_gpus=2,
        packages=("vllm",),
    ),
    Step(
        "pushes-tp2-gloo",
        "200 pushes under load to an engine on two GPUs, over gloo",
        (*_PYTEST, f"{_MANY_PUSHES}::test_to_two_tensor_parallel_workers_over_gloo"),
        num_gpus=2,
        packages=("vllm",),
    ),
    Step(
        "pushes-tp2-nccl",
        "200 pushes under load to an engine on two GPUs, over NCCL from a third",
        (*_PYTEST, f"{_MANY_PUSHES}::test_to_two_tensor_parallel_workers_over_nccl"),
        num_gpus=3,
        packages=("vllm",),
    ),
    Step(
        "fsdp2",
        "two ranks over NCCL make the optimizer steps of one",
        (*_PYTEST, "tests/trainer/policy/test_sharding_on_gpus.py"),
        num_gpus=2,
    ),
    Step(
        "engine-options",
        "speculative decoding and fp8 sample from the policy",
        (*_PYTEST, "-k", "not tensor_parallel", _ENGINE_OPTIONS),
        gpu_gib=16.0,
        packages=("vllm",),
    ),
    Step(
        "4-bit",
        "trainer and engine hold the same 4-bit base, before and after a push of adapters",
        (*_PYTEST, "tests/weights/test_4bit_on_gpu.py"),
        gpu_gib=16.0,
        packages=("vllm", "bitsandbytes", "vllm-bnb-plugin"),
    ),
    Step(
        "reward-model",
        "a reward model gives the rewards that it gives on the CPU",
        (*_PYTEST, "tests/rewarder/reward_models/test_on_gpu.py"),
    ),
    Step(
        "bench-trainer",
        "training tokens/s beside TRL's trainer, and MFU: the shape of Qwen2.5-0.5B, all weights",
        ("benchmarks.bench_trainer", "--only", "throughput", "--pairs", "3"),
        gpu_gib=40.0,
        packages=("trl",),
        numbers=_TRAINER_NUMBERS,
    ),
    Step(
        "cookbook",
        "the same with the settings of the Hugging Face cookbook's GRPO recipe: adapters, 128 short completions a step",
        ("benchmarks.bench_trainer", "--only", "throughput", "--pairs", "3", "--work", "cookbook"),
        gpu_gib=24.0,
        packages=("trl",),
        numbers=_TRAINER_NUMBERS,
    ),
)
