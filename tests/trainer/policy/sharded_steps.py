r"""Training ranks as processes, without Redis or a run: rank 0 makes steps on some models, the others follow.

    python -m services.trainer.supervision.rank_launcher --nproc-per-node 2 \
        DIR -- python -m tests.trainer.policy.sharded_steps

For each DIR/NAME/config.json it writes the same files as `make_steps` does in this process. Then it writes the results
of a series of failures to DIR/NAME/troubles.json.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.training_core import TrainingCore
from services.trainer.ranks.lead_core import LeadCore
from services.trainer.ranks.rank_group import follow_lead, is_follower, take_lead
from services.trainer.settings import TrainerSettings
from shared.errors import HeadraceError, PushError
from shared.run_options.run_config import RunConfig
from tests.trainer.cores import per_token_advantages, random_rows

NUM_STEPS = 6
"""Each kind of `rows_of_step` occurs."""
REPOSITORY = Path(__file__).parents[3]
WITHIN_S = 200
BUCKET_BYTES = 20_000


def start(
    directory: Path,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    node_rank: int = 0,
    endpoint: str = "127.0.0.1:0",
    worker: Sequence[str] = (sys.executable, "-m", "tests.trainer.policy.sharded_steps"),
) -> "subprocess.Popen[str]":
    """Start a launcher of ``num_ranks`` ranks."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HEADRACE_COLLECTIVE_TIMEOUT_S": "60"}
    launcher = [sys.executable, "-m", "services.trainer.supervision.rank_launcher", "--nproc-per-node", str(num_ranks)]
    place = ["--nnodes", str(num_nodes), "--node-rank", str(node_rank), "--endpoint", endpoint]
    return subprocess.Popen(
        [*launcher, *place, str(directory), "--", *worker],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_ranks(directory: Path, *, num_ranks: int) -> None:
    """Run the ranks of one node to their end."""
    node = start(directory, num_ranks=num_ranks)
    try:
        output, _ = node.communicate(timeout=WITHIN_S)
    finally:
        node.terminate()
    assert node.returncode == 0, output


def make_steps(core: TrainingCore, directory: Path) -> None:
    """Make the steps, and write their results."""
    results: list[dict[str, Any]] = []
    for step in range(NUM_STEPS):
        rows = rows_of_step(core, step)
        accumulated = core.accumulate(rows, per_token=[1, 4])
        stats = core.step()
        results.append(
            {
                "metrics": stats.metrics(),
                "num_rows": accumulated.num_rows,
                "num_passes": accumulated.num_passes,
                "num_pass_tokens": accumulated.num_pass_tokens,
                "probe": core.probe([1, 7, 30, 12, 5, 9]).tolist(),
                "per_token": {
                    index: [arrays.trainer_logprobs.tolist(), arrays.entropy.tolist(), arrays.advantage]
                    for index, arrays in sorted(accumulated.per_token.items())
                },
            }
        )
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in core.named_weights()}
    cast(Any, safetensors.torch).save_file(tensors, directory / "weights.safetensors")
    (directory / "result.json").write_text(json.dumps(results))


def rows_of_step(core: TrainingCore, step: int) -> list[TrainRow]:
    """Return rows of different lengths, with the logprobs of policy and reference at the current weights.

    One row has advantage 0, and in every second step one row has an advantage for each token.
    """
    rows = random_rows(3 + step % 5, seed=step)
    if step % 2:
        rows[0] = replace(rows[0], advantage=per_token_advantages(rows[0]))
    rows[2] = replace(rows[2], advantage=0.0)
    rows += random_rows(2, seed=100 + step)
    return [
        replace(row, reference_logprobs=of.reference_logprobs, old_logprobs=of.trainer_logprobs)
        for row, of in zip(rows, core.score(rows), strict=True)
    ]


def go_through_troubles(core: LeadCore, directory: Path) -> None:
    """Abort a read of the weights, meet a NaN, load a missing checkpoint; and go on after each of these."""
    described = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in core.named_weights.described()]
    given_up = iter(core.named_weights())
    first_name, _ = next(given_up)
    whole = dict(core.named_weights())
    rows = rows_of_step(core, 0)
    unfinished = iter(core.named_weights())
    next(unfinished)
    troubles: dict[str, Any] = {
        "described": described,
        "read": [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in whole.items()],
        "first_name": first_name,
        "given_up": _ends_with_push_error(given_up),
    }
    version = core.policy_version
    spoilt = [replace(row, advantage=float("nan")) if index in (1, 3) else row for index, row in enumerate(rows)]
    try:
        core.accumulate(spoilt)
    except NonFiniteError as error:
        troubles["at_fault"] = list(error.row_indices)
    troubles["overtaken"] = _ends_with_push_error(unfinished)
    try:
        core.load_state(directory / "nowhere")
    except (HeadraceError, OSError) as error:
        troubles["not_loaded"] = str(error)
    after = dict(core.named_weights())
    troubles["weights_are_as_they_were"] = all(torch.equal(whole[name], after[name]) for name in whole)
    core.accumulate(rows)
    core.step()
    troubles["steps_after"] = core.policy_version - version
    troubles["moved"] = float(
        np.max([float((tensor - whole[name]).abs().max()) for name, tensor in core.named_weights()])
    )
    (directory / "troubles.json").write_text(json.dumps(troubles))


def _ends_with_push_error(reading: Any) -> bool:
    try:
        list(reading)
    except PushError:
        return True
    return False


def main() -> int:
    """Run one rank; the run id is the directory."""
    directory, settings = Path(sys.argv[1]), TrainerSettings()
    if is_follower():
        return follow_lead(settings)
    lead = take_lead(settings)
    for path in sorted(directory.glob("*/config.json")):
        config = RunConfig.model_validate_json(path.read_text())
        core = LeadCore(
            config, model_dir_or_id=config.model, total_steps=NUM_STEPS, lead=lead, bucket_bytes=BUCKET_BYTES
        )
        make_steps(core, path.parent)
        go_through_troubles(core, path.parent)
    lead.close(run_is_over=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
