"""Run options for the weight push, and for the engine during a push."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.run_options.section import Positive, Section

WantedTransport = Literal["auto", "nccl", "ipc", "gloo", "disk"]
PushEncoding = Literal["auto", "full", "delta"]

_SCHEMES = ("file", "s3", "gs", "gcs", "az", "abfs")
"""Schemes of fsspec that are stores of files. Others fetch from the web, or chain into each other."""
_URL = re.compile(r"([a-z0-9]+)://(.+)")


class PushingOptions(Section):
    """Options of the weight push: transport, encoding, deadline, staging, KV cache and probe."""

    weight_transport: WantedTransport = Field(
        default="auto",
        description="How weights travel: auto is ipc where both ends share one GPU, nccl where both have GPUs and the "
        "same NCCL, else gloo; disk is a directory that both ends can reach",
    )
    weight_dir: str | None = Field(
        default=None,
        description="For disk: absolute path, or URL (s3://, gs://, az://), that trainer and generators can reach; "
        "each run has its own directory in it",
    )
    push_encoding: PushEncoding = Field(
        default="auto",
        description="Send all weights (full), or only changes since the last push (delta); auto is delta for "
        "disk, and full otherwise",
    )
    push_timeout_s: Positive = Field(
        default=60.0,
        description="Deadline of an attempt to push weights, in seconds; each 500 MB of weights add a second. An "
        "attempt also fails if the generators do not meet, or do not take a chunk, for this long",
    )
    vllm_enable_sleep_mode: bool = Field(
        default=False,
        description="For ipc with max_staleness 0: vLLM gives its GPU memory to the optimizer between two batches",
    )

    push_staging: Literal["memory", "none"] = Field(
        default="memory",
        description="Receive into separate memory while decoding goes on (memory), which takes room for a second copy "
        "of the weights in every vLLM worker, on its GPU if it fits there, else in main memory; or hold decoding "
        "during the whole push (none)",
    )
    kv_after_push: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="Keys and values of running requests after a push: computed anew under the new weights, or kept; "
        "the logprobs of later tokens then belong to neither version",
    )
    push_probe_tolerance: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="After a push each generator scores a prompt, and is taken out if a logprob differs from the "
        "trainer's by more, in nats; auto is 0.05 for float32, 1 for bfloat16, 4 for quantised weights; null is off",
    )

    @field_validator("weight_dir")
    @classmethod
    def _the_directory_is_one_both_ends_can_find(cls, where: str | None) -> str | None:
        if where is None or where.startswith("/"):
            return where
        url = _URL.fullmatch(where)
        if url is None or "::" in where:
            raise ValueError(f"{where!r} is neither an absolute path nor a URL such as s3://bucket/weights")
        if url.group(1) not in _SCHEMES:
            raise ValueError(f"weights are not kept at {url.group(1)}://; use a path, or one of {', '.join(_SCHEMES)}")
        return where

    @model_validator(mode="after")
    def _the_directory_goes_with_disk(self) -> Self:
        if self.weight_transport == "disk" and self.weight_dir is None:
            raise ValueError("weight_transport is disk, so set weight_dir to the directory for the weights")
        if self.weight_transport != "disk" and self.weight_dir is not None:
            raise ValueError(
                f"weight_dir is set, but weight_transport is {self.weight_transport}; set weight_transport: disk"
            )
        return self

    @model_validator(mode="after")
    def _what_is_kept_aside_needs_room(self) -> Self:
        if self.push_staging == "memory":
            if self.vllm_enable_sleep_mode:
                raise ValueError(
                    "a sleeping engine decodes nothing while it receives, and push_staging: memory would use the "
                    "memory that it releases; set push_staging: none"
                )
            return self
        if self.weight_transport == "disk":
            raise ValueError("weights on disk are read into staging memory; leave push_staging out")
        if self.push_encoding == "delta":
            raise ValueError("a delta is applied in staging memory; leave push_staging out, or set push_encoding: full")
        return self

    @model_validator(mode="after")
    def _a_delta_is_not_for_one_gpu(self) -> Self:
        if self.push_encoding == "delta" and self.weight_transport == "ipc":
            raise ValueError("within one GPU a delta takes longer to make than the weights take to copy; leave it out")
        return self

    @model_validator(mode="after")
    def _only_an_idle_engine_on_the_same_gpu_sleeps(self) -> Self:
        if not self.vllm_enable_sleep_mode:
            return self
        if self.weight_transport not in ("auto", "ipc"):
            raise ValueError(
                "vllm_enable_sleep_mode gives the generator's memory to a trainer on the same GPU, and "
                f"weight_transport is {self.weight_transport}; set weight_transport: ipc"
            )
        if self.kv_after_push == "keep":
            raise ValueError("a sleeping engine keeps no keys and values; leave kv_after_push out")
        if getattr(self, "max_staleness", 0) > 0:
            raise ValueError(
                "vllm_enable_sleep_mode needs max_staleness: 0: with a higher one the generator works while the "
                "optimizer does"
            )
        return self
