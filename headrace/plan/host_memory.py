"""Computes the main memory that a trainer node and a generator replica need. Pure.

Counted: the memory for loading the model, for writing checkpoints, for the copy of the last push from which deltas are
computed, and for staged weights that have no room on a GPU. Not counted: data sets, and the few GiB that Python, torch
and vLLM need in each process.
"""

from headrace.plan.memory import MASTER, saved_bytes, staged_bytes
from headrace.plan.rows import Row
from headrace.plan.workload import Workload

HOST = "main memory of a machine"


def host_rows(work: Workload) -> list[Row]:
    """Return the rows on the main memory of a trainer node and of a generator replica. Unknown numbers are left out."""
    return _of_trainer(work) + _of_replica(work)


def _of_trainer(work: Workload) -> list[Row]:
    loading = _loading(work)
    saved = work.adapter_parameters if work.config.use_peft else work.num_parameters
    if saved is None:
        return [loading] if loading.value else []
    ranks = work.trainer_gpus
    on_a_node = -(-ranks // work.config.nnodes)
    over = f" / {ranks} ranks x {on_a_node} of a node" if ranks > 1 else ""
    how = f"{saved_bytes(work.config)} bytes x trained parameters{over}, while a checkpoint is written"
    num_bytes = saved_bytes(work.config) * saved / ranks * on_a_node
    if work.config.weight_transport == "disk" or work.config.push_encoding == "delta":
        num_bytes += work.dtype_bytes * saved
        how += f"; {work.dtype_bytes} bytes x pushed parameters on the first rank's node: a copy of the last push"
    writing = _row("trainer node", num_bytes, f"{how}; Python and torch come on top")
    return [max(loading, writing, key=lambda row: row.value or 0.0)]


def _loading(work: Workload) -> Row:
    """Return the row on the memory that the first training rank needs while it loads the model."""
    config = work.config
    if config.use_peft and config.load_in_4bit:
        return _row("trainer node", 0.0, "the base in 4 bits is loaded onto the GPU")
    each = work.dtype_bytes if config.use_peft else MASTER
    how = f"{each} bytes x parameters on the first rank's node, while the model is loaded; Python and torch come on top"
    return _row("trainer node", each * work.num_parameters, how)


def _of_replica(work: Workload) -> list[Row]:
    staged = staged_bytes(work)
    if staged is None:
        return []
    (num_bytes, fits), workers = staged, work.engine.num_gpus
    name = "generator replica"
    if fits:
        return [_row(name, 0.0, "staged weights are on its GPUs; Python and vLLM come on top")]
    how = f"staged weights x {workers} {'workers' if workers > 1 else 'worker'}, from before the first push on; "
    how += "Python and vLLM come on top"
    return [_row(name, num_bytes * workers, how if fits is False else f"{how}; 0 if GPUs have room: give --gpu-gib")]


def _row(name: str, value: float, how: str) -> Row:
    return Row(HOST, name, value, "bytes", how)
