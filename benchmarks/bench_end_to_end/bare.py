"""Decoding alone and model math alone: ``python -m benchmarks.bench_end_to_end.bare TASK RESULT``.

    the work's prompts --> vLLM's LLM, in this process --> completions --> headrace's PolicyCore: pass, backward, step
                           ^ CPU seconds of decoding                       ^ CPU seconds of math

Both run in one thread, one after the other, on the work's initial weights, after a batch that only warms up.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_end_to_end.headrace_side import run_config
from benchmarks.bench_end_to_end.measured import Bare
from benchmarks.bench_end_to_end.processes import run_child
from benchmarks.bench_end_to_end.works import WORKS, Work
from services.generator.engine.vllm_environment import is_cpu_build, set_environment
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from shared.run_options.run_config import RunConfig, parse_run_config


def measure(work: Work, data: Path, directory: Path, *, num_batches: int, seed: int) -> Bare:
    """Measure in a new process."""
    task = {"work": work.name, "data": str(data), "num_batches": num_batches, "seed": seed}
    variables = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found = run_child("benchmarks.bench_end_to_end.bare", task, directory, variables=variables)
    return Bare(found["decoding_s"] / found["num_tokens"], found["math_s"] / found["num_tokens"])


def _measure(work: Work, config: RunConfig, data: Path, *, num_batches: int) -> dict[str, float]:
    decoder = _Decoder(config)
    lines = (data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines[: (num_batches + 1) * config.groups_per_step]]
    decoder.decode(prompts[: config.groups_per_step])
    began_at = time.process_time()
    rows = decoder.decode(prompts[config.groups_per_step :])
    decoding_s = time.process_time() - began_at
    core = PolicyCore(config, model_dir_or_id=config.model, total_steps=1000, device=torch.device("cpu"))
    _step(core, rows[: work.num_rows])
    began_at = time.process_time()
    for first in range(0, len(rows), work.num_rows):
        _step(core, rows[first : first + work.num_rows])
    math_s = time.process_time() - began_at
    return {
        "decoding_s": decoding_s,
        "math_s": math_s,
        "num_tokens": float(sum(int(row.loss_mask.sum()) for row in rows)),
    }


def _step(core: PolicyCore, rows: list[TrainRow]) -> None:
    core.accumulate(rows)
    core.step()


class _Decoder:
    """vLLM's LLM with the engine and sampling arguments of headrace's generator."""

    def __init__(self, config: RunConfig) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from services.generator.engine.engine_config import sampling_arguments
        from services.generator.engine.engine_spec import spec_for

        args = spec_for(config, has_cuda=False).engine_args({}, has_cuda=False)
        for name in ("weight_transfer_config", "worker_extension_cls", "scheduling_policy"):
            del args[name]
        self._llm: Any = LLM(**args)
        kinds: Any = RequestOutputKind
        self._params: Any = SamplingParams(**sampling_arguments(config, num_completions=config.num_generations))
        self._params.output_kind = kinds.FINAL_ONLY

    def decode(self, prompts: list[str]) -> list[TrainRow]:
        """Return the completions of all groups, in the trainer's format, with random advantages."""
        rng = np.random.default_rng(0)
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        rows: list[TrainRow] = []
        for output in outputs:
            prompt_ids = list(output.prompt_token_ids)
            for completion in output.outputs:
                ids = list(completion.token_ids)
                logprobs = [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
                rows.append(
                    TrainRow(
                        token_ids=np.array([*prompt_ids, *ids], dtype=np.int32),
                        loss_mask=np.array([0] * len(prompt_ids) + [1] * len(ids), dtype=np.uint8),
                        generator_logprobs=np.array(logprobs, dtype=np.float32),
                        advantage=float(rng.normal()),
                    )
                )
        return rows


def main() -> None:
    """Read the task, measure, write the result."""
    warnings.simplefilter("ignore")
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    set_environment(os.environ, is_cpu=is_cpu_build(), log_level="ERROR")
    torch.set_num_threads(1)
    work, data = WORKS[task["work"]], Path(task["data"])
    config = parse_run_config(run_config(work, data, total_steps=1000, max_staleness=2, seed=task["seed"]))
    found = _measure(work, config, data, num_batches=task["num_batches"])
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
