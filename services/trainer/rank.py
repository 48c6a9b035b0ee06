"""The training rank: ``python -m services.trainer.rank RUN_ID``, started and restarted by the run API.

    settings, record --> data set, tokenizer, model --> newest valid checkpoint --> take over --> training loop

Exit status: 0 the run has ended; 1 start me again (after SIGTERM too); 2 the run cannot go on, the reason is in its
record; 3 a newer incarnation owns the run.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from services.trainer.checkpoint import CheckpointError
from services.trainer.run_files import RunFiles
from services.trainer.settings import TrainerSettings
from shared.errors import FencedError, HeadraceError, StateLostError, UnavailableError
from shared.keys import TRAINERS, RunKeys
from shared.lease import lease
from shared.logs import configure_logging
from shared.redis_connection import Redis, connect, wait_until_ready
from shared.run_store import RunRecord, RunStore
from shared.streams import StreamConsumer

if TYPE_CHECKING:
    from services.trainer.policy_core import PolicyCore
    from services.trainer.training_loop import Ending, Parts

log = logging.getLogger("services.trainer.rank")

ENDED, CRASHED, REFUSED, FENCED = 0, 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    """Run one training rank; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m services.trainer.rank RUN_ID\n")
        return REFUSED
    try:
        settings = TrainerSettings()
    except ValidationError as error:
        # Without the input: it may hold a password.
        wrong = "; ".join(f"{item['loc']}: {item['msg']}" for item in error.errors(include_input=False))
        sys.stderr.write(f"the trainer's settings are wrong: {wrong}\n")
        return REFUSED
    configure_logging(settings.log_level)
    try:
        return asyncio.run(_run(settings, arguments[0]))
    except FencedError as error:
        log.error("%s", error)  # noqa: TRY400  the message is the whole story
        return FENCED
    except StateLostError as error:
        log.error("%s", error)  # noqa: TRY400
        return REFUSED
    except (HeadraceError, OSError) as error:
        log.error("the training rank ends and will be started again: %s", error)  # noqa: TRY400
        return CRASHED


async def _run(settings: TrainerSettings, run_id: str) -> int:
    terminate = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, terminate.set)
    redis = connect(settings.redis_url.get_secret_value())
    try:
        await wait_until_ready(redis, timeout_s=settings.redis_patience_s)
        store = RunStore(redis)
        record = await store.get(run_id)
        if record is None:
            raise StateLostError(f"there is no run {run_id} in Redis")
        try:
            return await _train(settings, redis, store, record, terminate)
        except (HeadraceError, BaseExceptionGroup) as error:
            cause = _first(error)
            if isinstance(cause, FencedError | StateLostError | UnavailableError | CheckpointError):
                raise cause from error
            if not isinstance(cause, HeadraceError):
                raise
            # Everything else we raise on purpose would happen again: the run ends with the reason in its record.
            log.error("%s", cause)  # noqa: TRY400
            await store.set_status(run_id, "failed", reason=str(cause))
            return REFUSED
    finally:
        await redis.aclose()


async def _train(
    settings: TrainerSettings, redis: Redis, store: RunStore, record: RunRecord, terminate: asyncio.Event
) -> int:
    from services.trainer.reconcile import check_not_fenced, take_over
    from services.trainer.training_loop import TrainingLoop
    from services.trainer.weight_sender import WeightSender

    config = record.parsed_config()
    epoch = await take_over(redis, RunKeys(record.run_id))
    sender = WeightSender(
        redis,
        run_id=record.run_id,
        internal_key=settings.internal_key.get_secret_value(),
        transport=config.weight_transport,
        bind_address=settings.push_address,
        push_timeout_s=config.push_timeout_s,
        incarnation=epoch,
        dtype=config.dtype,
    )
    try:
        parts = await assemble(redis, store, record, sender, epoch=epoch, replica_id=settings.replica_id or "trainer")
        async with lease(redis, leases=RunKeys(record.run_id).leases(TRAINERS), consumer=consumer_name(epoch)):
            ending: Ending = await TrainingLoop(parts, terminate=terminate).run()
        if ending == "terminated":
            log.info("asked to end; the run goes on from its checkpoint when it is started again")
            return CRASHED
        await asyncio.to_thread(_export, parts.core, parts.files, parts.tokenizer)
        await check_not_fenced(redis, parts.keys, epoch)
        await parts.log.event("status", {"status": ending})
        await store.set_status(record.run_id, ending)
        return ENDED
    finally:
        await sender.close()


async def assemble(
    redis: Redis, store: RunStore, record: RunRecord, sender: Any, *, epoch: int, replica_id: str = "trainer"
) -> "Parts":
    """Load everything, resume from the newest valid checkpoint, and account for every group ever admitted."""
    from services.trainer.admission import Admission
    from services.trainer.admission_pace import AdmissionPace
    from services.trainer.batch_builder import BatchBuilder
    from services.trainer.checkpoint import newest_valid, remove_leftovers
    from services.trainer.dataset import open_dataset
    from services.trainer.ledger import Ledger
    from services.trainer.prompt_encoder import PromptEncoder, load_tokenizer
    from services.trainer.push_log import PushLog
    from services.trainer.reconcile import missing_groups
    from services.trainer.run_log import RunLog
    from services.trainer.schedule import total_steps
    from services.trainer.scored_groups import ScoredGroups
    from services.trainer.training_loop import Parts

    config, keys = record.parsed_config(), RunKeys(record.run_id)
    files = RunFiles(Path(record.run_dir))
    rows = await asyncio.to_thread(open_dataset, config)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model, config.model_revision)
    steps = total_steps(config, num_rows=len(rows))
    core = await asyncio.to_thread(_make_core, config, steps)
    await asyncio.to_thread(remove_leftovers, files.checkpoints)
    checkpoint = await asyncio.to_thread(newest_valid, files.checkpoints)
    ledger, trained_tokens = Ledger(), 0
    if checkpoint is not None:
        await asyncio.to_thread(_load, core, checkpoint)
        ledger = Ledger.from_json(checkpoint.extra["ledger"])
        trained_tokens = int(checkpoint.extra["trained_tokens"])
        log.info("resumed from %s at step %d", checkpoint.path, checkpoint.step)
    run_log = RunLog(redis, keys=keys, run_dir=files.run_dir)
    await asyncio.to_thread(run_log.cut_back_to, core.policy_version)
    admission = Admission(
        redis,
        keys=keys,
        config=config,
        rows=rows,
        encoder=PromptEncoder(tokenizer),
        ledger=ledger,
        epoch=epoch,
        replica_id=replica_id,
    )
    admission.admit_again(await missing_groups(redis, keys, ledger))
    consumer = StreamConsumer(
        redis,
        stream=keys.scored,
        consumer_group=TRAINERS,
        name=consumer_name(epoch),
        leases=keys.leases(TRAINERS),
        dead=keys.dead,
        reclaim_every_s=1.0,
        max_deliveries=None,  # entries wait here for a checkpoint, across any number of restarts
    )
    scored = ScoredGroups(redis, keys=keys, ledger=ledger, epoch=epoch, consumer=consumer)
    return Parts(
        redis=redis,
        keys=keys,
        config=config,
        store=store,
        core=core,
        ledger=ledger,
        admission=admission,
        pace=AdmissionPace(config, ledger=ledger),
        scored=scored,
        batches=BatchBuilder(config, scored=scored, ledger=ledger),
        pushes=PushLog(
            sender,
            run_log=run_log,
            num_pushes=record.progress.pushes,
            num_confirmed=record.progress.pushes_confirmed,
        ),
        files=files,
        log=run_log,
        tokenizer=tokenizer,
        replica_id=replica_id,
        epoch=epoch,
        total_steps=steps,
        trained_tokens=trained_tokens,
    )


def consumer_name(epoch: int) -> str:
    """Return this incarnation's name on the scored stream: one that wakes up late must not read in a newer one's."""
    return f"trainer-{epoch}"


def _make_core(config: Any, steps: int) -> "PolicyCore":
    import torch

    from services.trainer.policy_core import PolicyCore

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return PolicyCore(config, model_dir_or_id=config.model, total_steps=steps, device=device)


def _load(core: "PolicyCore", checkpoint: Any) -> None:
    from services.trainer.checkpoint import load_into

    load_into(core, checkpoint)


def _export(core: "PolicyCore", files: RunFiles, tokenizer: Any) -> None:
    """Write the final model directory, whole or not at all."""
    aside = files.run_dir / "model.tmp"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(aside)
    core.save_pretrained(aside, tokenizer)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(files.model)
    os.replace(aside, files.model)


def _first(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group: the others are its consequences."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
