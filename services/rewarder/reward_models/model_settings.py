"""Settings that determine how reward models are loaded and called."""

import msgspec

from shared.files.file_roots import FileRoots, default_roots


class ModelSettings(msgspec.Struct, frozen=True):
    """Settings of reward models: device, data type, size limits and deadlines. Times are in seconds."""

    device: str = "auto"
    dtype: str = "auto"
    max_batch_tokens: int = 16384
    max_loaded: int = 2
    load_timeout_s: float = 600.0
    queue_timeout_s: float = 300.0
    check_timeout_s: float = 15.0
    roots: FileRoots = FileRoots(default_roots(), "HEADRACE_DATA_ROOTS")
    """Directories that models on this machine must be in."""
    min_hang_s: float = 10.0
    """A process is killed only after this long on one piece of work: loading a model again costs more than waiting."""
