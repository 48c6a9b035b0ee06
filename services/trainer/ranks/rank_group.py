"""Sets up a training rank among several: torchrun's environment describes the group, rank 0 leads it.

    rank 0        take_lead --> make_core --> LeadCore      the training loop drives it like a PolicyCore
    rank 1, ...   follow_lead                               until the run is over

With one rank, torchrun, process group and followers are not needed: `make_core` returns a PolicyCore.
"""

import ctypes
import logging
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.trainer.policy.ranks import RankLostError
from services.trainer.ranks.exit_status import CRASHED, ENDED, REFUSED
from services.trainer.ranks.rank_words import leave_word
from services.trainer.settings import TrainerSettings
from shared.errors import HeadraceError, UserError
from shared.run_options.run_config import RunConfig

if TYPE_CHECKING:
    from services.trainer.policy.training_core import TrainingCore
    from services.trainer.ranks.lead import Lead

log = logging.getLogger(__name__)

LAUNCHER_PID = "HEADRACE_LAUNCHER_PID"
"""Environment variable with the launcher's process id; a rank must not outlive its launcher."""
_PR_SET_PDEATHSIG = 1


def is_one_of_several() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_follower() -> bool:
    """Return whether this process is a training rank other than rank 0."""
    return is_one_of_several() and os.environ["RANK"] != "0"


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, even by kill -9.

    Without this, torchrun's children would live on.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(CRASHED)  # the launcher died before prctl took effect


def warn_of_little_locked_memory(environment: Mapping[str, str], *, devices: Path = Path("/dev/infiniband")) -> None:
    """Log a warning if NCCL would use RDMA here and this process may not lock unlimited memory.

    RDMA pins memory, so NCCL would fail later. Containers do not run as root, so they cannot lift the limit: it must be
    raised on the machine. Only the first rank of each machine logs it.
    """
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


def take_lead(settings: TrainerSettings) -> "Lead":
    """Enter the group as rank 0. Returns once all other ranks have entered.

    Raises:
        RankLostError: Not every rank came in time.
        UserError: This machine has more ranks than GPUs.
    """
    from services.trainer.ranks.distributed_ranks import join_ranks
    from services.trainer.ranks.lead import Lead

    _limit_threads()
    return Lead(join_ranks(timeout_s=settings.collective_timeout_s))


def make_core(config: RunConfig, *, total_steps: int, lead: "Lead | None") -> "TrainingCore":
    """Return the core that the training loop drives. It spans all ranks if ``lead`` is given.

    Raises:
        UserError: The model cannot be used; the message says why.
        RankLostError: A rank is gone.
    """
    if lead is not None:
        from services.trainer.policy.sharding import fetch
        from services.trainer.ranks.lead_core import LeadCore

        fetch(
            config.model, revision=config.model_revision
        )  # the others wait for a command meanwhile, without a deadline
        return LeadCore(config, model_dir_or_id=config.model, total_steps=total_steps, lead=lead)

    import torch

    from services.trainer.policy.policy_core import PolicyCore

    _limit_threads()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return PolicyCore(config, model_dir_or_id=config.model, total_steps=total_steps, device=device)


def follow_lead(settings: TrainerSettings) -> int:
    """Join the group as a rank other than 0, execute rank 0's commands until the run ends, and return the exit status.

    Errors are logged and stored for the launcher; they determine the exit status.
    """
    from services.trainer.ranks.distributed_ranks import join_ranks
    from services.trainer.ranks.follower import follow

    _limit_threads()
    try:
        ranks = join_ranks(timeout_s=settings.collective_timeout_s)
        follow(ranks)
    except UserError as error:
        log.critical("%s", error)
        leave_word(str(error), status=REFUSED)
        return REFUSED
    except (HeadraceError, OSError) as error:
        log.critical("%s", error)
        leave_word(str(error), status=CRASHED, is_loss=isinstance(error, RankLostError))
        return CRASHED
    ranks.close()
    return ENDED


def _limit_threads() -> None:
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
