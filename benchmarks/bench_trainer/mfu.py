"""Model FLOP/s utilisation: the FLOP/s of the model's products, divided by what the GPU could do."""

import re

from benchmarks.bench_trainer.workload import Workload

PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100 80GB HBM3": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
"""Dense bfloat16 FLOP/s by the name that CUDA reports, from NVIDIA's data sheets; these print twice as much for sparse
matrices. A part of a GPU (MIG) has a name of its own and is not here."""


def peak_flops(gpu: str) -> float | None:
    """Return the peak of a GPU by its name; None if it is not known."""
    if "MIG" in gpu:
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if re.search(rf"\b{name}\b(?! D)", gpu)), None)


def mfu(workload: Workload, *, tokens_per_s: float, gpu: str) -> float | None:
    """Return the utilisation; None if the GPU's peak is not known.

    A weight takes part in a product of the forward pass and one of the backward pass for each token, and in a second
    one of the backward pass if it is trained: 2 FLOP each. Recomputed activations and attention are not counted.
    """
    if (peak := peak_flops(gpu)) is None:
        return None
    flop_per_weight = 4 if workload.lora_r else 6
    return round(flop_per_weight * workload.num_parameters() * tokens_per_s / peak, 4)
