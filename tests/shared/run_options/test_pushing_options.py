"""Options of the weight push: contradictions are refused, with the reason."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

RUN: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}


def run(**options: Any) -> RunConfig:
    return parse_run_config(RUN | options)


@pytest.mark.parametrize("where", ["/mnt/weights", "s3://bucket/weights", "gs://bucket", "file:///mnt/weights"])
def test_disk_takes_an_absolute_path_or_the_url_of_a_store(where: str) -> None:
    assert run(weight_transport="disk", weight_dir=where).weight_dir == where


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weight_transport": "disk"}, "set weight_dir to the directory for the weights"),
        ({"weight_dir": "/mnt/weights"}, "weight_dir is set, but weight_transport is auto; set weight_transport: disk"),
        ({"weight_transport": "disk", "weight_dir": "weights"}, "'weights' is neither an absolute path nor a URL"),
        ({"weight_transport": "disk", "weight_dir": "https://example.org/weights"}, "not kept at https://"),
        ({"weight_transport": "disk", "weight_dir": "simplecache::s3://bucket"}, "neither an absolute path nor a URL"),
        ({"weight_transport": "ipc", "push_encoding": "delta"}, "within one GPU a delta takes longer"),
        ({"vllm_enable_sleep_mode": True, "push_staging": "none"}, "needs max_staleness: 0"),
        ({"vllm_enable_sleep_mode": True, "max_staleness": 0}, "set push_staging: none"),
        ({"weight_transport": "disk", "weight_dir": "/w", "push_staging": "none"}, "read into staging memory"),
        ({"push_encoding": "delta", "push_staging": "none"}, "applied in staging memory"),
        (
            {"vllm_enable_sleep_mode": True, "max_staleness": 0, "push_staging": "none", "weight_transport": "gloo"},
            "weight_transport is gloo; set weight_transport: ipc",
        ),
    ],
)
def test_incompatible_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        run(**options)
    assert complaint in str(caught.value)


def test_an_engine_on_the_trainers_gpu_may_sleep_between_batches() -> None:
    options = {"max_staleness": 0, "push_staging": "none", "weight_transport": "ipc"}
    assert run(vllm_enable_sleep_mode=True, **options).vllm_enable_sleep_mode
