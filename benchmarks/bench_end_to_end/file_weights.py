"""A worker extension for TRL's vLLM server on a CPU: loads weights from a file, as vLLM loads a broadcast."""

import importlib
from typing import Any

from services.generator.worker.model_load import CheckedReload

NAME = "benchmarks.bench_end_to_end.file_weights.FileWeights"


class FileWeights:
    """vLLM adds this class to the bases of its worker, without calling any constructor."""

    def load_weights_of(self, path: str) -> None:
        """Replace all weights by those in a safetensors file."""
        runner: Any = getattr(self, "model_runner")  # noqa: B009  an attribute of vLLM's worker
        reader: Any = importlib.import_module("safetensors.torch")  # partly untyped
        reload = CheckedReload(runner.model, runner.vllm_config.model_config)
        reload.load(reader.load_file(path).items())
        reload.check_complete()
        reload.finish()
