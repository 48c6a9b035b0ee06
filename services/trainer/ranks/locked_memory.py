"""Says at the start of a rank what NCCL would fail of later: RDMA pins memory, and the machine bounds how much.

Containers start nothing as root, so no capability lifts the bound: it is the machine's to raise.
"""

import logging
import resource
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


def warn_of_little_locked_memory(environment: Mapping[str, str], *, devices: Path = Path("/dev/infiniband")) -> None:
    """Log a warning if NCCL would use RDMA here and this process may not lock all the memory it likes."""
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
