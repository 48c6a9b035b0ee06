"""TRL's GRPOTrainer in its own process: ``python -m benchmarks.bench_end_to_end.trl_side TASK RESULT``.

Plain (``use_vllm=False``), nothing of TRL is changed.

With a vLLM server (``vllm_mode="server"``), two methods of TRL's client are replaced, because they need CUDA. Its NCCL
group is not created. The weights go to the server through a safetensors file in memory (/dev/shm), which the worker
loads when a request to vLLM's own /collective_rpc route arrives. TRL waits for that after each step, as it waits for
its broadcast. The server is vLLM's own OpenAI server, in float32. Its worker has as many cores as TRL has
torch threads. Requests, schedule and trainer are TRL's.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset

from benchmarks.bench_end_to_end.file_weights import NAME
from benchmarks.bench_end_to_end.measured import Measured, Step
from benchmarks.bench_end_to_end.processes import REPOSITORY, run_child, tree_cpu_s
from benchmarks.bench_end_to_end.works import WORKS, Work
from benchmarks.local_generator import child
from headrace.local.held_port import HeldPort

_SERVER_START_S = 300.0


def run(
    work: Work, data: Path, directory: Path, *, num_steps: int, threads: int, has_vllm: bool, seed: int
) -> tuple[Measured, Path]:
    """Make one run in a new process; return its numbers and the directory of its final model."""
    found = run_child(
        "benchmarks.bench_end_to_end.trl_side",
        {
            "work": work.name,
            "data": str(data),
            "directory": str(directory),
            "num_steps": num_steps,
            "threads": threads,
            "has_vllm": has_vllm,
            "seed": seed,
        },
        directory,
        variables={"OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    steps = [Step(*step) for step in found["steps"]]
    return Measured(steps, work.num_warmup_steps, found["cpu_s"], longest=found["longest"]), directory / "model"


def _train(
    work: Work, data: Path, directory: Path, *, num_steps: int, server_url: str | None, seed: int
) -> dict[str, Any]:
    trl: Any = importlib.import_module("trl")
    base_trainer: Any = importlib.import_module("trl.trainer.base_trainer")
    transformers: Any = importlib.import_module("transformers")
    module, _, function = work.reward.partition(":")
    total = work.num_warmup_steps + num_steps
    steps: list[list[float]] = []
    ended_at: list[float] = []
    cpu_at_s: dict[int, float] = {}
    longest: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        """Notes when each step ended, and its metrics."""

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            ended_at.append(time.time())
            if state.global_step in (work.num_warmup_steps, total):
                cpu_at_s[state.global_step] = tree_cpu_s(os.getpid())

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
            if "reward" in logs:
                tokens = logs["completions/mean_length"] * work.num_rows
                steps.append([ended_at[-1], tokens, logs["reward"]])
                if state.global_step > work.num_warmup_steps:
                    longest.append(logs["completions/max_length"])

    with_server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server_url}
    args = trl.GRPOConfig(
        **work.trl_options(),
        **(with_server if server_url else {"use_vllm": False}),
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # as headrace's default decides for these models; TRL's default is slower here
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        logging_steps=1,
        max_steps=total,
        seed=seed,
        model_init_kwargs={"dtype": "float32"},
    )
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    with mock.patch.object(base_trainer, "send_telemetry"):
        trainer = trl.GRPOTrainer(
            model=str(data / "model"),
            reward_funcs=[getattr(importlib.import_module(module), function)],
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(data / "model"),
            callbacks=[Watch()],
        )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(str(directory / "model"))
    return {
        "steps": steps,
        "cpu_s": cpu_at_s[total] - cpu_at_s[work.num_warmup_steps],
        "longest": max(longest),
    }


@contextlib.contextmanager
def _vllm_server(data: Path, directory: Path, *, threads: int) -> Generator[str]:
    """Run vLLM's OpenAI server, and patch TRL's client for it."""
    port = HeldPort()
    port.let_bind()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port.number), "--model", str(data / "model"), "--dtype", "float32", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"]
    command += ["--worker-extension-cls", NAME]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    url = f"http://127.0.0.1:{port.number}"
    with port, child(command, directory / "vllm.log", environment) as process:
        _until_healthy(url, process, directory / "vllm.log")
        yield url


def _until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import httpx

    deadline = time.monotonic() + _SERVER_START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"vLLM's server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


@contextlib.contextmanager
def _cpu_client(directory: Path) -> Generator[None]:
    """Replace the two methods of TRL's client that need CUDA."""
    vllm_client: Any = importlib.import_module("trl.generation.vllm_client")
    writer: Any = importlib.import_module("safetensors.torch")
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else directory
    path = shared_memory / f"bench-end-to-end-{os.getpid()}.safetensors"

    def init_communicator(self: Any, device: Any = 0) -> None:
        del self, device

    def update_named_params(self: Any, metadata: Any, named_params: Any) -> None:
        del metadata
        writer.save_file({name: tensor.contiguous() for name, tensor in named_params}, path)
        self._post(f"{self.base_url}/collective_rpc", json={"method": "load_weights_of", "args": [str(path)]})

    try:
        with (
            mock.patch.object(vllm_client.VLLMClient, "init_communicator", init_communicator),
            mock.patch.object(vllm_client.VLLMClient, "update_named_params", update_named_params),
        ):
            yield
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    """Read the task, train, write the result."""
    warnings.simplefilter("ignore")
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    data, directory, threads = Path(task["data"]), Path(task["directory"]), int(task["threads"])
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        url = None
        if task["has_vllm"]:
            url = stack.enter_context(_vllm_server(data, directory, threads=threads))
            stack.enter_context(_cpu_client(directory))
        found = _train(
            WORKS[task["work"]], data, directory, num_steps=task["num_steps"], server_url=url, seed=task["seed"]
        )
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
