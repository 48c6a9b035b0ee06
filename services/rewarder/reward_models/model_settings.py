"""How reward models are loaded and asked."""

import msgspec

from shared.file_roots import FileRoots, default_roots


class ModelSettings(msgspec.Struct, frozen=True):
    """How models are loaded and asked; times in seconds."""

    device: str = "auto"
    dtype: str = "auto"
    max_batch_tokens: int = 16384
    max_loaded: int = 2
    load_timeout_s: float = 600.0
    queue_timeout_s: float = 300.0
    check_timeout_s: float = 15.0
    roots: FileRoots = FileRoots(default_roots(), "HEADRACE_DATA_ROOTS")
    """Below which models on this machine lie."""
    min_hang_s: float = 10.0
    """No process is killed that was at one thing for less: a short deadline is not worth loading a model again."""
