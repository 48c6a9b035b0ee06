"""MFU of known GPUs, by numbers computed by hand; none of GPUs whose peak is not known."""

import pytest

pytest.importorskip("torch")

from benchmarks.bench_trainer.mfu import mfu, peak_flops
from benchmarks.bench_trainer.workload import COOKBOOK, HALF_BILLION

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GB200", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_exactly_this_gpu(gpu: str, peak: float | None) -> None:
    assert peak_flops(gpu) == peak


def test_mfu_counts_six_flop_a_weight_and_token_or_four_if_only_adapters_are_trained() -> None:
    # 24 layers of 14,909,440 weights, and 151,936 x 896 of the tied embedding.
    assert HALF_BILLION.num_parameters() == COOKBOOK.num_parameters() == 493_961_216
    # 6 x 493,961,216 x 100,000 / 989e12 = 0.2997
    assert mfu(HALF_BILLION, tokens_per_s=100_000, gpu="NVIDIA H200") == 0.2997
    assert mfu(COOKBOOK, tokens_per_s=100_000, gpu="NVIDIA H200") == 0.1998
    assert mfu(COOKBOOK, tokens_per_s=100_000, gpu="Tesla T4") is None
