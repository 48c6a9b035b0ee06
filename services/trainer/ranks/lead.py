"""Leads the training ranks from rank 0: all of them execute one command at a time, and answer it before the next.

    LeadCore --together(commands, own part)--+--> rank 0 does its part
                                             +--> the others do theirs (follower.py) --done, or why not--> LeadCore
    between commands, every 15 s: still here

Interrupting rank 0 between two commands leaves nothing half done. A lost rank makes the command fail, here and on all
other ranks. A failure that only some ranks have leaves the ranks out of step: every later command is refused, this
process ends, and all ranks are started again from the checkpoint.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from services.trainer.checkpoints.checkpoint_writer import CheckpointError
from services.trainer.policy.core_results import NonFiniteError
from services.trainer.policy.ranks import RankLostError
from services.trainer.ranks.distributed_ranks import DistributedRanks, is_rank_loss
from services.trainer.ranks.rank_commands import Build, Command, Done, End, Failed, StillHere, decode_answer, encode
from shared.errors import HeadraceError, UserError

_ResultT = TypeVar("_ResultT")

_STILL_HERE_EVERY_S = 15.0
_END_S = 10.0
_AGREE_S = 10.0
"""How long to wait, after rank 0 failed, for the others to fail too. If they do, the ranks are still in step."""
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UserError, CheckpointError, NonFiniteError, OSError)
}


class Lead:
    """Sends commands from rank 0 to the other training ranks, and collects their answers.

    Args:
        ranks: The group; this process is its rank 0.
    """

    def __init__(self, ranks: DistributedRanks) -> None:
        self.ranks = ranks
        self._turn = threading.Lock()
        self._is_broken = False
        self._ended = threading.Event()
        threading.Thread(target=self._say_still_here, name="still here", daemon=True).start()

    @property
    def num_ranks(self) -> int:
        """Number of ranks, this one included."""
        return self.ranks.size

    def together(
        self,
        commands: Sequence[Command],
        own: Callable[[], _ResultT],
        *,
        row_indices: Sequence[tuple[int, ...]] | None = None,
    ) -> tuple[_ResultT, list[Done]]:
        """Have the other ranks execute their commands, and call ``own``. Return the result of ``own`` and the answers.

        Args:
            commands: One command for each rank, including rank 0.
            own: Executes rank 0's command in this process.
            row_indices: For each rank, the indices of its rows among all rows. If given, a NonFiniteError names the
                rows of all ranks.

        Raises:
            HeadraceError: A rank failed. If it failed with an OSError, an OSError is raised.
            RankLostError: A rank is gone, or was late.
        """
        with self._own_turn(timeout_s=self.ranks.timeout_s):
            self._is_broken = True  # until all ranks have answered
            self.ranks.send(self._to_others(commands), timeout_s=self.ranks.timeout_s)
            try:
                result = self._own_part(commands[0], own)
            except RankLostError:
                raise
            except (HeadraceError, OSError) as error:
                at_fault = None if isinstance(commands[0], Build) else self._after_failure(error, row_indices)
                if at_fault is None:
                    raise
                raise NonFiniteError(str(error), row_indices=at_fault) from error
            answers = self._answers(timeout_s=self.ranks.timeout_s)
            failed = [answer for answer in answers if isinstance(answer, Failed)]
            if failed:
                raise _ERRORS.get(failed[0].error, HeadraceError)(failed[0].message)
            self._is_broken = False
            return result, [answer for answer in answers if isinstance(answer, Done)]

    def close(self, *, run_is_over: bool) -> None:
        """Stop leading. If the run is over, have the other ranks exit with status 0.

        Otherwise they see this process end, and all ranks are started again.
        """
        self._ended.set()
        if run_is_over and not self._is_broken:
            with contextlib.suppress(RankLostError), self._own_turn(timeout_s=_END_S):
                self.ranks.send(self._to_others([End()] * self.ranks.size), timeout_s=_END_S)

    def _own_part(self, command: Command, own: Callable[[], _ResultT]) -> _ResultT:
        try:
            return own()
        except RuntimeError as error:
            if is_rank_loss(error):
                raise self.ranks.lost(f"doing {type(command).__name__}", error) from error
            raise

    def _after_failure(
        self, failure: Exception, row_indices: Sequence[tuple[int, ...]] | None
    ) -> tuple[int, ...] | None:
        """Find out whether all ranks failed. For a NonFiniteError, return the rows at fault on all ranks; else None."""
        try:
            answers = self._answers(timeout_s=_AGREE_S)
        except RankLostError:
            return None
        # If all ranks refused the command, they are in step, and the loop may go on to find the cause.
        self._is_broken = not all(isinstance(answer, Failed) for answer in answers)
        if not isinstance(failure, NonFiniteError) or row_indices is None:
            return None
        local = [failure.row_indices, *(answer.row_indices for answer in answers if isinstance(answer, Failed))]
        return tuple(sorted(own[row] for own, found in zip(row_indices, local, strict=False) for row in found))

    def _answers(self, *, timeout_s: float) -> list[Done | Failed]:
        return [decode_answer(self.ranks.receive(rank, timeout_s=timeout_s)) for rank in range(1, self.ranks.size)]

    def _to_others(self, commands: Sequence[Command]) -> dict[int, bytes]:
        return {rank: encode(command) for rank, command in enumerate(commands) if rank}

    @contextlib.contextmanager
    def _own_turn(self, *, timeout_s: float) -> Generator[None]:
        """Within the block, let no other thread send a command.

        Raises:
            RankLostError: An earlier command did not end within ``timeout_s``, or the ranks are out of step.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise RankLostError(f"a command to the training ranks did not end within {timeout_s:.0f} s")
        try:
            if self._is_broken:
                raise RankLostError("the training ranks are out of step after a failure; they will be restarted")
            yield
        finally:
            self._turn.release()

    def _say_still_here(self) -> None:
        """Between commands, tell the others that rank 0 is alive."""
        while not self._ended.wait(_STILL_HERE_EVERY_S):
            if self._turn.acquire(blocking=False):
                try:
                    if not self._is_broken:
                        self.ranks.send(self._to_others([StillHere()] * self.ranks.size), timeout_s=_END_S)
                except RankLostError:
                    self._is_broken = True  # the next command raises it
                finally:
                    self._turn.release()
