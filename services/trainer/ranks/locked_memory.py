"""Warns at the start of a rank about a later NCCL failure: RDMA pins memory, which the machine may limit.

Containers do not run as root, so they have no capability to lift the limit. It must be raised on the machine.
"""

import logging
import resource
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def warn_of_little_locked_memory(environment: Mapping[str, str], *, devices: Path = Path("/dev/infiniband")) -> None:
    """Log a warning if NCCL would use RDMA here and this process may not lock unlimited memory."""
    if environment.get("NCCL_IB_DISABLE") == "1" or environment.get("LOCAL_RANK", "0") != "0":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or not any(devices.glob("uverbs*")):
        return
    log.warning(
        "there are RDMA devices in %s, but this process may lock only %d KiB of memory (`ulimit -l`): NCCL is likely "
        "to fail with 'Call to ibv_reg_mr failed'. Start containers with an unlimited memlock (LimitMEMLOCK=infinity "
        "in containerd's unit, `--ulimit memlock=-1` with Docker), or set NCCL_IB_DISABLE=1 to go without RDMA",
        devices,
        limit // 1024,
    )
