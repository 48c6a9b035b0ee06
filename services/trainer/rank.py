"""The training rank: ``python -m services.trainer.rank RUN_ID``, started and restarted by the run API.

    read settings and run --> take the run over --> load data, model, newest valid checkpoint --> train --> export

Exit status: 0 the run is over; 1 crashed or asked to end, start it again; 2 the run cannot go on; 3 a newer trainer
owns the run.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, cast

from services.trainer.beginning.way_on import reason_of_failure
from services.trainer.checkpoints.checkpoint_writer import CheckpointError
from services.trainer.policy.ranks import RankLostError
from services.trainer.ranks.exit_status import CRASHED, ENDED, FENCED, REFUSED
from services.trainer.ranks.rank_group import (
    die_with_launcher,
    follow_lead,
    is_follower,
    is_one_of_several,
    take_lead,
    warn_of_little_locked_memory,
)
from services.trainer.ranks.rank_words import LastWords, leave_word
from services.trainer.settings import TrainerSettings
from shared.errors import FencedError, HeadraceError, StateLostError, UnavailableError, UserError
from shared.interfaces import let_nccl_use
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_back
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_places import require_places
from shared.service.child_secrets import hide_secrets
from shared.service.exiting import exit_at_once
from shared.service.garbage import collected_later, freeze_long_lived_objects
from shared.service.logs import about_run, configure_first_logging, configure_logging, log_lines
from shared.settings import from_environment

if TYPE_CHECKING:
    from services.trainer.loop.training_loop import Ending, TrainingLoop
    from services.trainer.ranks.lead import Lead
    from services.trainer.run_context import RunContext

log = logging.getLogger("services.trainer.rank")

_HURRY_S, _LAST_REPORTS_S = 5.0, 60.0


def main(argv: list[str] | None = None) -> int:
    """Run one training rank until it ends, and return its exit status: 0, 1, 2 or 3, as in exit_status.py."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m services.trainer.rank RUN_ID\n")
        return REFUSED
    configure_first_logging(os.environ)
    try:
        settings = from_environment(TrainerSettings)
    except UserError as error:
        log_lines(log, error)
        return REFUSED
    hide_secrets(os.environ)
    configure_logging(settings.log_level, log_format=settings.log_format)
    about_run(arguments[0])
    die_with_launcher()
    # Only if all ranks are on this machine. Ranks on several may use another network, and choose it themselves.
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        with contextlib.suppress(OSError):  # the push reports an address that does not resolve
            let_nccl_use(settings.push_address, os.environ)
    warn_of_little_locked_memory(os.environ)
    with LastWords():
        if is_follower():
            return follow_lead(settings)
        try:
            return asyncio.run(_run(settings, arguments[0]))
        except FencedError as error:
            log.critical("%s", error)
            leave_word(str(error), status=FENCED)
            return FENCED
        except StateLostError as error:
            log.critical("%s", error)
            leave_word(str(error), status=REFUSED)
            return REFUSED
        except (HeadraceError, OSError) as error:
            log.critical("the training rank ends and will be restarted: %s", error)
            leave_word(str(error), status=CRASHED, is_loss=isinstance(error, RankLostError))
            return CRASHED


async def _run(settings: TrainerSettings, run_id: str) -> int:
    terminate = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, terminate.set)
    redis = connect(settings.redis_url.get_secret_value())
    try:
        # The service that started this rank could log in to Redis. A password that is refused now may be accepted soon.
        await wait_until_back(redis, timeout_s=settings.redis_patience_s)
        store = RunStore(redis)
        record = await store.get(run_id)
        if record is None:
            raise StateLostError(f"there is no run {run_id} in Redis")
        await store.write_starting(record, "starting")
        lead: Lead | None = None
        status = CRASHED
        try:
            if is_one_of_several():
                lead = await asyncio.to_thread(take_lead, settings)
            status = await _train(settings, redis, store, record, terminate, lead)
        except (HeadraceError, BaseExceptionGroup) as error:
            cause = _first(error)
            if isinstance(cause, FencedError | StateLostError | UnavailableError | CheckpointError):
                raise cause from error
            if not isinstance(cause, HeadraceError):
                raise
            # Every other HeadraceError would occur again after a restart: the run fails, with the reason in its record.
            reason = await asyncio.to_thread(reason_of_failure, cause, record)
            log.critical("%s", reason)
            leave_word(reason, status=REFUSED)
            await store.set_status(run_id, "failed", reason=reason)
            status = REFUSED
        finally:
            if lead is not None:
                await asyncio.to_thread(lead.close, run_is_over=status in (ENDED, REFUSED))
        return status
    finally:
        await redis.aclose()


async def _train(
    settings: TrainerSettings,
    redis: Redis,
    store: RunStore,
    record: RunRecord,
    terminate: asyncio.Event,
    lead: "Lead | None",
) -> int:
    with collected_later():
        from services.trainer.fence import take_over
        from services.trainer.loop.assembly import assemble, consumer_name

        importlib.import_module("transformers.models.auto.modeling_auto")  # assemble would import it
    from services.trainer.disk_room import Room
    from services.trainer.push.push_settings import PushSettings
    from services.trainer.push.weight_sender import WeightSender
    from services.trainer.run_context import RunContext

    config = record.parsed_config()
    require_places(config, data=settings.places_of_data(), weights=settings.places_of_weights())
    incarnation = await take_over(redis, RunKeys(record.run_id))
    store.write_as(incarnation)
    pushing = PushSettings(
        run_id=record.run_id,
        internal_key=settings.internal_key.get_secret_value(),
        peers=settings.generator_tls(),
        transport=config.weight_transport,
        # Adapters are small, and every element of them changes.
        encoding="full" if config.use_peft else config.push_encoding,
        weight_dir=config.weight_dir,
        bind_address=settings.push_address,
        push_timeout_s=config.push_timeout_s,
        incarnation=incarnation,
        dtype=config.dtype,
    )
    sender = WeightSender(redis, pushing)
    run = RunContext(redis, store, record, incarnation, settings.replica_id or "trainer", Room(terminate))
    try:
        training = await assemble(run, sender, terminate=terminate, lead=lead, data_roots=settings.places_of_data())
        freeze_long_lived_objects()
        ending: Ending = "terminated"
        try:
            async with lease(redis, leases=run.keys.leases(TRAINERS), consumer=consumer_name(incarnation)):
                ending = await training.run()
        finally:
            if ending == "terminated":  # the run continues in another process, so this one has no time to report
                await asyncio.to_thread(training.reporting.close, run_is_over=False, timeout_s=_HURRY_S)
        return await _conclude(run, training, ending, terminate)
    finally:
        await sender.close()


async def _conclude(run: "RunContext", training: "TrainingLoop", ending: "Ending", terminate: asyncio.Event) -> int:
    """Send the last reports, export the model and record how the run ended. Return the exit status.

    If only this process was to end, none of it is done: the run continues in another one.
    """
    from services.trainer.export.final_model import leave_model
    from services.trainer.fence import check_not_fenced

    if ending == "terminated":
        log.info("asked to end; the run continues from its checkpoint after a restart")
        return CRASHED
    run_id, run_log = run.record.run_id, training.reporting.log
    reporter = asyncio.create_task(training.reporting.write_progress_for_ever(), name="progress reporter")
    best = training.best if run.config.load_best_model_at_end else None
    try:
        training.reporting.waits_for("its trackers to take the last reports" if run.config.report_to else "")
        await asyncio.to_thread(training.reporting.close, run_is_over=True, timeout_s=_LAST_REPORTS_S)
        upload = " and uploaded" if run.config.push_to_hub else ""
        training.reporting.waits_for(f"its final model to be written{upload}")
        warning = await leave_model(
            run.files,
            run.config,
            run_id=run_id,
            step=training.outflow.saver.saved_step,
            best_step=None if best is None else best.step,
            chose=training.reporting.leaves_model_of,
            run_log=run_log,
            room=run.room,
            terminate=terminate,
        )
    finally:
        reporter.cancel()
        (failure,) = await asyncio.gather(reporter, return_exceptions=True)
        if isinstance(failure, Exception):  # a CancelledError is none
            log.warning("the progress was not reported to the end: %s", failure)
    if warning is None:
        log.info("asked to end; the model is uploaded after a restart")
        return CRASHED
    training.reporting.waits_for("")
    await training.reporting.write_progress()
    await check_not_fenced(run.redis, run.keys, run.incarnation)
    early = training.best.why_it_stops() if training.best and training.stops_early and ending == "finished" else ""
    reason = "; ".join(filter(None, (early, warning)))
    await run_log.event("status", {"status": ending, "reason": reason})
    await run.store.set_status(run_id, ending, reason=reason)
    return ENDED


def _first(error: BaseException) -> BaseException:
    """Return the first exception in an exception group, which caused the others; other errors are returned as is."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


if __name__ == "__main__":
    try:
        exit_status = main()
    except Exception:  # noqa: BLE001  unexpected, so the status is that of a crash
        traceback.print_exc()
        exit_status = CRASHED
    if exit_status != ENDED:
        exit_at_once(exit_status)  # sys.exit would wait for a thread that is stuck in torch
