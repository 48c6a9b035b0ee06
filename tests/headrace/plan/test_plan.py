"""`headrace plan`: numbers computed by hand."""

from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_line as cli
from headrace.plan.redis_memory import group_bytes
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.headrace.plan.plan_rig import PACE, large_model, planned, value

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, with no environment variable that names a service."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADRACE_STATE_DIR", "HEADRACE_URL", "HEADRACE_API_KEY", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model of 8 190 735 360 parameters."""
    return large_model(tmp_path / "model")


def test_what_the_trainer_keeps_is_what_the_plan_says() -> None:
    """Float32 weights and two float32 moments per parameter, by the trainer's own optimizer."""
    torch = pytest.importorskip("torch")
    from services.trainer.policy.optimizers.optimizer import make_optimizer
    from shared.run_options.run_config import RunConfig

    config = RunConfig(model="m", dataset_name="d", reward_funcs=["accuracy_reward"], max_steps=1, dtype="bfloat16")
    weight = torch.nn.Parameter(torch.zeros(10, 10))
    optimizer = make_optimizer({"w": weight}, config)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [kept for kept in optimizer.state[weight].values() if kept.numel() > 1]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (weight, weight.grad, *moments))
    assert num_bytes == 16 * weight.numel()


def test_memory_of_trainer_and_generator_is_as_worked_out_by_hand(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(
        capsys, "--model", model, "--dtype", "bfloat16", "--trainer-gpus", 4, "--gpu-gib", 80, "--max-prompt-length",
        512, "--max-completion-length", 4096, "--num-generations", 8, "--completion-tokens", 1500,
        "--prompt-tokens", 200,
    )  # fmt: skip
    trainer, generator = "trainer, each GPU", "generator, each GPU"
    assert body["num_parameters"] == 8_190_735_360
    assert value(body, trainer, "weights") == 4 * 8_190_735_360 / 4
    assert value(body, trainer, "gradients") == 4 * 8_190_735_360 / 4
    assert value(body, trainer, "moments") == 8 * 8_190_735_360 / 4
    assert value(body, trainer, "activations, at least") == 4 * 36 * 16384 * 4096
    assert value(body, generator, "weights") == 2 * 8_190_735_360
    assert value(body, generator, "KV cache of a token") == 2 * 36 * 8 * 128 * 2
    room = 0.92 * 80 * 2**30 - 2 * 8_190_735_360
    assert value(body, generator, "tokens in it") == int(room / 147_456)
    assert value(body, generator, "sequences at full length") == int(room / 147_456) // 4608
    assert value(body, generator, "groups in flight") == int(0.8 * room / 147_456) // (200 + 8 * 1500)
    assert value(body, "disk", "a checkpoint") == 12 * 8_190_735_360
    assert "kept in main memory" in body["plan"][generator]["staged weights"]["how"]


@pytest.mark.parametrize(
    ("gib", "vllm", "groups"),
    [(80, "{}", 1024 // 8), (69, "{}", 256 // 8), (80, "{max_num_seqs: 64}", 64 // 8),
     (80, "{max_num_seqs: 64, data_parallel_size: 2}", 2 * 64 // 8)],
)  # fmt: skip
def test_no_more_groups_are_in_flight_than_vllm_decodes_at_once(
    model: Path, gib: int, vllm: str, groups: int, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(
        capsys, "--model", model, "--dtype", "bfloat16", "--trainer-gpus", 4, "--gpu-gib", gib,
        "--num-generations", 8, "--completion-tokens", 100, "--max-completion-length", 128,
        "--set", f"vllm={vllm}", "--set", "max_inflight_groups=1000",
    )  # fmt: skip
    assert value(body, "generator, each GPU", "groups in flight") == groups


def test_tensor_parallelism_divides_weights_and_heads_but_not_what_is_staged(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model, "--dtype", "bfloat16", "--set", "vllm={tensor_parallel_size: 4}")
    generator = "generator, each GPU"
    assert value(body, generator, "weights") == 2 * 8_190_735_360 / 4
    assert value(body, generator, "KV cache of a token") == 2 * 36 * 2 * 128 * 2
    assert value(body, generator, "staged weights") == 2 * 8_190_735_360


def test_a_pipeline_divides_the_layers_and_engines_beside_each_other_have_a_cache_each(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 heads over 2 GPUs, 36 layers over 4 stages, two replicas: weights are on 8 GPUs, and a replica has 16."""
    sizes = "vllm={tensor_parallel_size: 2, pipeline_parallel_size: 4, data_parallel_size: 2}"
    asked = ("--model", model, *PACE, "--generator-tokens-per-s", 3000, "--gpu-gib", 8, "--prompt-tokens", 100)
    body = planned(capsys, *asked, "--set", sizes, status=1)  # the trainer's own GPU is too small
    generator = "generator, each GPU"
    assert body["generator_gpus"] == 16
    assert value(body, generator, "weights") == 2 * 8_190_735_360 / 8
    per_token = 2 * 9 * 4 * 128 * 2
    assert value(body, generator, "KV cache of a token") == per_token
    room = 0.92 * 8 * 2**30 - 2 * 8_190_735_360 / 8
    assert value(body, generator, "tokens in it") == int(room / per_token)
    assert value(body, generator, "groups in flight") == 2 * int(0.8 * room / per_token / (100 + 8 * 1500))
    assert value(body, "pace", "generator GPUs a trainer GPU") == 3 * 16
    given = planned(capsys, *asked, "--set", sizes, "--generator-gpus", 32, status=1)
    assert value(given, generator, "KV cache of a token") == per_token / 2, "layers split over twice as many"
    assert cli.main(["plan", "--model", str(model), "--set", sizes, "--generator-gpus", "12"]) == 2
    assert "not a multiple of pipeline_parallel_size=4 x data_parallel_size=2" in capsys.readouterr().err


def test_a_lora_run_keeps_the_base_in_its_dtype_and_sixteen_bytes_an_adapter_parameter(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model, "--dtype", "bfloat16", "--set", "use_peft=true", "--set", "lora_r=16")
    q, kv, mlp = 2 * (4096 + 4096), 2 * (4096 + 1024), 3 * (4096 + 12288)
    adapters = 16 * 36 * (q + kv + mlp)
    trainer = "trainer, each GPU"
    assert value(body, trainer, "frozen base") == 2 * 8_190_735_360
    assert value(body, trainer, "adapters: weights, gradients, moments") == 16 * adapters
    options = ("--model", model, "--dtype", "bfloat16", "--set", "gradient_checkpointing=true", "--trainer-gpus", 2)
    full = planned(capsys, *options)
    lora = planned(capsys, *options, "--set", "use_peft=true")
    assert value(lora, trainer, "activations, at least") * 2 == value(full, trainer, "activations, at least")
    embeddings = 2 * 151_936 * 4096
    assert value(full, trainer, "gathered by FSDP") - value(lora, trainer, "gathered by FSDP") == 2 * embeddings
    assert value(body, "disk", "a checkpoint") == 12 * adapters


def test_a_part_that_does_not_fit_is_marked_and_the_exit_status_is_1(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", model, "--dtype", "bfloat16", "--gpu-gib", 16)
    body = planned(capsys, *arguments, status=1)
    assert body["plan"]["trainer, each GPU"]["in all, at least"]["is_warning"]
    assert body["plan"]["generator, each GPU"]["KV cache"]["is_warning"]
    assert not body["fits"]
    assert cli.main(["plan", *map(str, arguments)]) == 1
    assert "this does not fit: trainer, each GPU; generator, each GPU" in capsys.readouterr().err


def test_of_any_model_of_a_size_what_its_size_decides_is_planned_and_the_rest_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """16 bytes per parameter over 4 ranks; 0.92 x 80 GiB less 2 bytes per parameter are left for the KV cache."""
    asked = ("--parameters", "8e9", "--dtype", "bfloat16", "--trainer-gpus", 4, "--gpu-gib", 80)
    body = planned(capsys, *asked, *PACE[2:], "--generator-tokens-per-s", 3000)
    assert body["model"] is None
    assert body["num_parameters"] == 8_000_000_000
    assert value(body, "trainer, each GPU", "in all, at least") == 16 * 8e9 / 4
    assert value(body, "generator, each GPU", "KV cache, at most") == 0.92 * 80 * 2**30 - 2 * 8e9
    assert value(body, "disk", "a checkpoint") == 12 * 8e9
    assert value(body, "pace", "generators") == 3
    missing = " ".join(body["missing"])
    for name in ("activations, at least", "gathered by FSDP", "KV cache of a token", "tokens in it"):
        assert f"{name}: give --model" in missing
    assert cli.main(["plan", *map(str, asked)]) == 0
    assert "any model: 8,000,000,000 parameters;" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--generator-gpus", "3"), ("--set", "vllm={tensor_parallel_size: 3}")])
def test_a_replica_on_gpus_that_cannot_share_the_heads_is_refused_with_numbers_that_can(
    model: Path, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--model", str(model), *arguments]) == 2
    said = capsys.readouterr().err
    assert "splits each layer over 3 GPUs, and 32 attention heads (8 of keys and values)" in said
    assert "choose from 1, 2, 4, 8, 16, 32." in said


def test_main_memory_is_added_up_for_a_trainer_node_and_a_replica(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 ranks on 2 nodes hold 12 bytes per parameter in total; each of 2 workers stages 2 bytes per parameter."""
    arguments = ("--model", model, "--dtype", "bfloat16", "--trainer-gpus", 4, "--set", "nnodes=2")
    small = planned(capsys, *arguments, "--generator-gpus", 2, "--gpu-gib", 80)
    host = "main memory of a machine"
    assert value(small, host, "trainer node") == 12 * 8_190_735_360 / 2
    assert value(small, host, "generator replica") == 2 * 2 * 8_190_735_360
    # Weights of 15.3 GiB, embeddings of 1.2 and 1 GiB to spare; the engine leaves 8 %.
    for gib, in_main_memory in ((215, 2 * 2 * 8_190_735_360), (220, 0)):
        large = planned(capsys, *arguments, "--generator-gpus", 2, "--gpu-gib", gib)
        assert value(large, host, "generator replica") == in_main_memory


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [(("use_peft=true",), 2), (("use_peft=true", "lora_target_modules=[q_proj]"), 2),
     (("nnodes=4",), 4)],
)  # fmt: skip
def test_the_first_rank_reads_the_whole_model_into_main_memory(
    model: Path, options: tuple[str, ...], num_bytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 4 nodes, a checkpoint takes 12 / 4 bytes per parameter of each, and loading takes 4 of the first's."""
    settings = (part for option in options for part in ("--set", option))
    body = planned(capsys, "--model", model, "--dtype", "bfloat16", "--trainer-gpus", 8, *settings)
    assert value(body, "main memory of a machine", "trainer node") == num_bytes * 8_190_735_360


def test_a_base_in_4_bits_is_not_loaded_into_main_memory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--set", "use_peft=true", "--set", "load_in_4bit=true")
    body = planned(capsys, "--model", model, "--dtype", "bfloat16", *options)
    checkpoint = value(body, "disk", "a checkpoint")
    assert value(body, "main memory of a machine", "trainer node") == checkpoint


@pytest.mark.parametrize("option", ["push_encoding=delta", "weight_transport=disk"])
def test_deltas_take_main_memory_for_a_copy_of_the_last_push(
    model: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", model, "--dtype", "bfloat16", "--set", option, "--set", "weight_dir=/w")
    body = planned(capsys, *arguments[: None if "disk" in option else -2])
    assert value(body, "main memory of a machine", "trainer node") == (12 + 2) * 8_190_735_360


def test_adapters_are_staged_in_main_memory_also_without_staging(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--set", "use_peft=true", "--set", "lora_r=16", "--set", "push_staging=none", "--gpu-gib", 280)
    body = planned(capsys, "--model", model, "--dtype", "bfloat16", *options)
    adapters = 16 * 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert value(body, "main memory of a machine", "generator replica") == 2 * adapters


def test_redis_holds_what_is_in_flight_and_what_waits_for_a_checkpoint(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = planned(capsys, "--model", model, *PACE, "--set", "save_steps=5")
    assert value(body, "redis", "groups, about") == 96 + 2 * 5 * 32
    one = value(body, "redis", "a group")
    assert value(body, "redis", "streams, about") == one * 416
    assert value(body, "redis", "maxmemory") == 2 * one * 416 + 256 * 2**20


@pytest.mark.parametrize(("generations", "tokens"), [(8, 250), (16, 2048)])
async def test_a_group_takes_the_memory_in_redis_that_is_planned_for(
    redis: Redis, generations: int, tokens: int
) -> None:
    size = group_bytes(
        num_generations=generations, prompt_tokens=200, completion_tokens=tokens, reward_funcs=["accuracy_reward"]
    )
    stream = RunKeys("run-test").scored
    for number in range(20):
        await redis.xadd(stream, {"group_id": f"{number:08d}", "payload": b"x" * size})
    used: Any = await redis.memory_usage(stream, samples=0)
    assert size * 20 <= used <= 1.3 * size * 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a model"),
        (["--model", "/nowhere"], "/nowhere is neither an existing directory nor a Hugging Face id"),
        (["--model", "."], "has no config.json"),
        (["--model", "q8/config.json"], "the file q8/config.json does not exist; give the model's directory"),
        (["--parameters", "8e9", "--generator-gpus", "3", "--model", "MODEL"], "cannot be shared evenly"),
        (["--parameters", "0.6"], "write 0.6 billion as 6e8"),
        (["run.yaml"], "there is no file run.yaml"),
        (["--model", "MODEL", "--set", "num_generatons=4"], "did you mean num_generations?"),
        (
            ["--model", "MODEL", "--max-completion-length", "50000", "--set", "max_tokens_per_microbatch=50000"],
            "the model takes 40960",
        ),
        (["--model", "MODEL", "--completion-tokens", "600"], "max_completion_length=512"),
        (["--from-run", "run-a"], "no headrace service found"),
    ],
)
def test_arguments_that_cannot_be_planned_for_are_refused_in_a_sentence(
    model: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(str(model) if one == "MODEL" else one for one in arguments)]) == 2
    assert says in capsys.readouterr().err


def test_the_table_shows_what_is_not_known_as_a_question(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "8,190,735,360 parameters" in shown
    assert "?" in shown
    assert "make bench-generator" in " ".join(shown.split())
