"""Memory in use by this rank: main memory, and GPU memory if it has a GPU."""

import os
import resource
from pathlib import Path

import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the present and the peak memory. Each call resets the peak of the GPU."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = {
        # The kernel updates the two counters separately and late; use is never shown above the peak.
        "memory/rss_bytes": float(min(num_pages * os.sysconf("SC_PAGE_SIZE"), peak_bytes)),
        "memory/peak_rss_bytes": float(peak_bytes),
    }
    if device.type == "cuda":
        metrics["memory/device_bytes"] = float(torch.cuda.memory_allocated(device))
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
