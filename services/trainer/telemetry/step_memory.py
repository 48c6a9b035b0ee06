"""How much memory this rank uses: of the machine, and of its GPU if it has one."""

import os
import resource
from pathlib import Path

import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return what is used now and the most that was; the peak of the GPU begins again with each call."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics = {
        # The kernel counts the two apart, some pages late; what is used is never shown above the most that was.
        "memory/rss_bytes": float(min(num_pages * os.sysconf("SC_PAGE_SIZE"), peak_bytes)),
        "memory/peak_rss_bytes": float(peak_bytes),
    }
    if device.type == "cuda":
        metrics["memory/device_bytes"] = float(torch.cuda.memory_allocated(device))
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
