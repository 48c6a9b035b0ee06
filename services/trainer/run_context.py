"""The run that a training rank trains: its record, its settings, its files, and its trainer's incarnation."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

from services.trainer.disk_room import Room
from services.trainer.run_files import RunFiles
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_record import RunRecord
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig


@dataclass(frozen=True)
class RunContext:
    """The run that this process trains, with access to its record, its files and its keys in Redis.

    Args:
        redis: Client of the Redis server that has the run's streams.
        store: Reads and writes the run's record in Redis.
        record: The run's record, as this trainer found it.
        incarnation: This trainer's incarnation.
        replica_id: This trainer's name in the time stamps of groups.
        room: Repeats writes while the disk is full.
    """

    redis: Redis
    store: RunStore
    record: RunRecord
    incarnation: int
    replica_id: str = "trainer"
    room: Room = field(default_factory=Room)

    @functools.cached_property
    def config(self) -> RunConfig:
        """The run's settings, parsed from its record."""
        return self.record.parsed_config()

    @property
    def keys(self) -> RunKeys:
        """The names of the run's keys in Redis."""
        return RunKeys(self.record.run_id)

    @property
    def files(self) -> RunFiles:
        """The paths of the subdirectories in the run's directory."""
        return RunFiles(Path(self.record.run_dir))

    async def starting(self, doing: str) -> None:
        """Write the present stage of the start, such as "loading the model", into the progress that users see."""
        await self.store.write_starting(self.record, doing)
