"""The objects that the routes of the run API use, created once."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from services.trainer.export.exported_files import ExportedFiles
from services.trainer.run_api.event_stream import EventStreams
from services.trainer.run_api.idempotency import IdempotencyKeys
from services.trainer.run_api.run_lookup import fitting
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.engine_check import GeneratorAsker
from services.trainer.submit_checks.run_validation import RunValidator
from services.trainer.supervision.run_supervisor import RunSupervisor
from services.trainer.uploads.module_store import ModuleStore
from services.trainer.uploads.upload_disk import UploadDisk
from services.trainer.uploads.upload_expiry import ClientFiles, texts_in
from services.trainer.uploads.upload_store import UploadStore
from shared.access.keyring import Keyring
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.service.tls import ServerCertificate


@dataclass(frozen=True)
class TrainerApi:
    """The settings, stores, supervisor and locks that the routes of the run API share."""

    settings: TrainerSettings
    redis: Redis
    store: RunStore
    supervisor: RunSupervisor
    validator: RunValidator
    streams: EventStreams
    idempotency: IdempotencyKeys
    keyring: Keyring
    certificate: ServerCertificate | None
    stopping: asyncio.Event
    uploads: UploadStore | None = None
    """None if this deployment takes no uploads."""
    modules: ModuleStore | None = None
    """None if this deployment takes no code from clients."""
    exported_files: ExportedFiles = field(default_factory=ExportedFiles)
    hashing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a model's files are read for their hashes. Clients that wait for it take no threads from others."""
    hashing_uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))
    """Held while the hash of an uploaded file is checked."""
    changing_uploads: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an upload is begun, completed or used. Clients that wait for it take no threads from others."""
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a run is added to the queue, or deleted. Always taken before ``editing``."""
    editing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the settings of a run are changed, or it is deleted."""

    @property
    def client_files(self) -> list[ClientFiles]:
        """The stores of uploaded files and modules, as far as this deployment has them."""
        return [store for store in (self.uploads, self.modules) if store is not None]

    async def use_files(self, settings: Any) -> None:
        """Note a use of the uploads that a run's settings name, so that no upload expires before the run is queued."""
        named = [*texts_in(settings)]
        for store in self.client_files:
            async with self.changing_uploads:
                await asyncio.to_thread(store.use, *named)


def make_api(
    settings: TrainerSettings, redis: Redis, *, stopping: asyncio.Event, validator: RunValidator | None = None
) -> TrainerApi:
    """Create the stores, the supervisor and the locks of the run API. Nothing is started yet.

    Raises:
        UserError: The keys file or the certificate cannot be used.
    """
    store = RunStore(redis)
    return TrainerApi(
        settings=settings,
        redis=redis,
        store=store,
        supervisor=RunSupervisor(store, settings=settings, stopping=stopping),
        validator=validator
        or RunValidator(
            settings,
            engine_check=GeneratorAsker(redis, settings).check,
            find_runs=lambda reference: fitting(store, reference),
        ),
        streams=EventStreams(
            redis,
            store=store,
            stopping=stopping,
            heartbeat_s=settings.heartbeat_s,
            max_streams=settings.max_event_streams,
        ),
        idempotency=IdempotencyKeys(redis, abandoned_after_s=settings.longest_submit_s()),
        keyring=settings.keyring(),
        certificate=settings.certificate(),
        stopping=stopping,
        uploads=_uploads(settings),
        modules=_modules(settings),
    )


def _uploads(settings: TrainerSettings) -> UploadStore | None:
    if settings.uploads_dir is None:
        return None
    return UploadStore(
        settings.uploads_dir,
        max_bytes=settings.max_upload_bytes,
        keep_free_bytes=settings.uploads_keep_free_bytes,
    )


def _modules(settings: TrainerSettings) -> ModuleStore | None:
    directory = settings.code_uploads_dir
    if directory is None:
        return None
    keep_free = settings.uploads_keep_free_bytes
    return ModuleStore(
        directory, disk=UploadDisk(directory, variable="HEADRACE_CODE_UPLOADS_DIR", keep_free_bytes=keep_free)
    )


def trainer_api(request: Request) -> TrainerApi:
    """Return the application's TrainerApi; a FastAPI dependency."""
    return cast("TrainerApi", request.app.state.trainer)


Api = Annotated[TrainerApi, Depends(trainer_api)]
