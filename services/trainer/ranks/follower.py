"""Runs every training rank except the first: executes rank 0's commands in the order they arrive.

    rank 0 --command--> [PolicyCore] --done, or why not--> rank 0

A follower does not use Redis and does not see prompt groups. It exits when rank 0 reports the end of the run. If rank 0
disappears, it exits so that it can be started again: at once if the connection closes; if rank 0 is silent, after
``_SILENCE_S`` or the timeout of collectives, whichever is longer. It ignores SIGTERM, because rank 0 may need all ranks
for a last checkpoint.
"""

import logging
import signal
from pathlib import Path

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.policy.ranks import RankLostError
from services.trainer.ranks.distributed_ranks import DistributedRanks, is_rank_loss
from services.trainer.ranks.rank_commands import (
    Accumulate,
    Answer,
    BeginFrom,
    BeginSave,
    Build,
    Command,
    Discard,
    Done,
    End,
    Failed,
    GatherBucket,
    GradNorm,
    LoadState,
    Score,
    ScoreProbe,
    Step,
    StillHere,
    TakeWeights,
    decode_command,
    encode,
    pack_arrays,
    unpack_plan,
)
from services.trainer.ranks.weight_buckets import WeightBuckets
from shared.errors import HeadraceError
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_SILENCE_S = 120.0
"""Longest silence of rank 0, in seconds. Rank 0 sends StillHere every 15 s (lead.py)."""
_REFUSED_S = 30.0
"""How long to try to send an error to rank 0, which may be waiting for this rank in a collective instead."""


def follow(ranks: DistributedRanks) -> None:
    """Execute rank 0's commands until the run is over.

    Raises:
        RankLostError: A rank is gone.
        HeadraceError: This rank failed, and rank 0 did not receive the error.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follower = Follower(ranks)
    silence_s = max(_SILENCE_S, ranks.timeout_s)  # rank 0 is silent while it waits for a slower rank's answer
    while True:
        command = decode_command(ranks.receive(0, timeout_s=silence_s))
        if isinstance(command, End):
            return
        if isinstance(command, StillHere):
            continue
        try:
            answer = follower.do(command)
        except RankLostError:
            raise
        except (HeadraceError, OSError) as error:
            log.error("%s", error)  # noqa: TRY400  rank 0 decides what it means
            _offer(ranks, error)
        except RuntimeError as error:
            if is_rank_loss(error):
                raise ranks.lost(f"doing {type(command).__name__}", error) from error
            raise
        else:
            ranks.send({0: encode(answer)}, timeout_s=ranks.timeout_s)


class Follower:
    """Executes rank 0's commands on this rank's PolicyCore, which the command Build creates."""

    def __init__(self, ranks: DistributedRanks) -> None:
        self._ranks = ranks
        self._core: PolicyCore | None = None
        self._buckets: WeightBuckets | None = None

    def do(self, command: Command) -> Answer:
        """Execute one command together with all other ranks.

        Raises:
            HeadraceError: The core failed.
        """
        if isinstance(command, Build):
            self._core = PolicyCore(
                RunConfig.model_validate_json(command.config),
                model_dir_or_id=command.model_dir_or_id,
                total_steps=command.total_steps,
                device=self._ranks.device,
                ranks=self._ranks,
            )
            self._buckets = WeightBuckets(self._core.lm, dtype=self._core.dtype, bucket_bytes=command.bucket_bytes)
            return Done()
        if self._core is None or self._buckets is None:
            raise RankLostError(f"rank 0 sent {type(command).__name__} before Build")
        if isinstance(command, GatherBucket):
            self._buckets.gather(command.bucket)
            return Done()
        return _do(self._core, command)


def _do(core: PolicyCore, command: Command) -> Answer:
    match command:
        case Accumulate(rows=rows, plan=plan, totals=totals, per_token=per_token):
            stats = core.accumulate(
                [row.unpacked() for row in rows],
                totals=None if totals is None else StepTotals(**totals),  # type: ignore[arg-type]
                plan=unpack_plan(plan),
                per_token=per_token,
            )
            arrays = stats.per_token.items()
            return Done(
                pack_arrays({row: [of.trainer_logprobs, of.importance_ratio, of.entropy] for row, of in arrays})
            )
        case Score(rows=rows, plan=plan):
            scores = enumerate(core.score([row.unpacked() for row in rows], plan=unpack_plan(plan)))
            return Done(
                pack_arrays({row: [of.trainer_logprobs, of.entropies, of.reference_logprobs] for row, of in scores})
            )
        case ScoreProbe(token_ids=token_ids):
            core.probe(token_ids)
        case Step(total_steps=total_steps):
            core.step(total_steps)
        case GradNorm():
            core.grad_norm()
        case Discard():
            core.discard()
        case BeginSave(directory=directory):
            core.begin_save(Path(directory), None)  # rank 0's future has the result of all ranks
        case LoadState(directory=directory):
            core.load_state(Path(directory))
        case BeginFrom(directory=directory):
            core.begin_from(Path(directory))
        case TakeWeights(directory=directory):
            core.take_weights(Path(directory))
        case _:
            raise RankLostError(f"rank 0 sent {type(command).__name__}, which is not a command for a core")
    return Done()


def _offer(ranks: DistributedRanks, error: HeadraceError | OSError) -> None:
    """Send an error to rank 0 as the answer to a command; raise it here if rank 0 does not receive it."""
    row_indices = error.row_indices if isinstance(error, NonFiniteError) else ()
    failed = Failed(type(error).__name__, str(error), row_indices)
    try:
        ranks.send({0: encode(failed)}, timeout_s=_REFUSED_S)
    except RankLostError:
        raise error from None
