"""Changes the number of generators of a running `headrace up`, and moves the remaining ones to other cores.

    `headrace scale` --SIGUSR1--> start new generators, or end the last ones --> restart the others one after another

A generator has to restart to run on other cores. It then loads its model and waits for the next push before it is ready
again. So a ready generator is restarted only while another one is ready, and the next one only when it is ready again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.local.launch_ports import Doors, hold_generators
from headrace.local.running_services import RunningServices
from headrace.local.supervised_process import ServiceSpec
from shared.errors import UserError

_LOOK_EVERY_S = 0.2


class Movable(Protocol):
    """A generator that can be restarted on other cores."""

    async def is_ready(self) -> bool:
        """Return whether the generator is ready to take prompts."""
        ...

    async def move(self) -> None:
        """End the generator and start it on its new cores. Does not wait until it is ready."""
        ...


class GeneratorScaling:
    """Changes the number of generators of a running `headrace up`.

    Args:
        services: The running services.
        doors: The ports of the generators, by index. Changed in place.
        metrics_port: First of the consecutive metrics ports; 0 means no metrics.
        scheme: ``http`` or ``https``.
        check: Raises UserError if there are too few GPUs for this number of generators.
        make_spec: Returns a generator's spec, given its index, its ports and the number of generators.
        is_ready: Whether the generator at this URL is ready to take prompts.
        say: Prints a line for the user.
    """

    def __init__(
        self,
        services: RunningServices,
        doors: list[Doors],
        *,
        metrics_port: int,
        scheme: str,
        check: Callable[[int], object],
        make_spec: Callable[[int, Doors, int], ServiceSpec],
        is_ready: Callable[[str], Awaitable[bool]],
        say: Callable[[str], None],
    ) -> None:
        self._services = services
        self._doors = doors
        self._metrics_port = metrics_port
        self._scheme = scheme
        self._check = check
        self._make_spec = make_spec
        self._is_ready = is_ready
        self._say = say

    async def scale(self, wanted: int) -> list[ServiceSpec] | None:
        """Start new generators, or end the ones with the highest indices, until there are ``wanted``.

        Returns:
            The specs of all generators. None if there are too few GPUs or ports: the user is told, and nothing changes.
        """
        doors = self._doors
        try:
            self._check(wanted)
            more = hold_generators(range(len(doors), wanted), metrics_port=self._metrics_port, scheme=self._scheme)
        except (UserError, OSError) as error:
            self._say(f"generators: {len(doors)}, as before: {error}")
            return None
        self._say(f"generators: {len(doors)} -> {wanted}")
        leaving = {f"generator-{index}" for index in range(wanted, len(doors))}
        num_staying = min(wanted, len(doors))
        closing = doors[wanted:]
        doors[wanted:] = more
        specs = [self._make_spec(index, one, wanted) for index, one in enumerate(doors)]
        for spec in specs[num_staying:]:
            self._services.start(spec)
        await self._services.end(leaving)
        for one in closing:
            one.close()
        return specs

    async def place(self, specs: Sequence[ServiceSpec], *, is_outdated: Callable[[], bool]) -> None:
        """Restart the generators whose cores have changed with the number of generators, one after another."""
        places = [
            _Place(spec, doors.url, self._is_ready, self._services)
            for spec, doors in zip(specs, self._doors, strict=True)
        ]
        now = self._services.specs()
        moving = [place for place in places if now.get(place.spec.name) != place.spec]
        if moving:
            self._say(f"moving {', '.join(place.spec.name for place in moving)} to other cores, one after another")
        others = [place for place in places if place not in moving]
        await rearrange(moving, others=others, is_outdated=is_outdated)


@dataclass(frozen=True)
class _Place:
    """A generator and the spec with its new cores."""

    spec: ServiceSpec
    url: str
    is_ready_at: Callable[[str], Awaitable[bool]]
    services: RunningServices

    async def is_ready(self) -> bool:
        return await self.is_ready_at(self.url)

    async def move(self) -> None:
        await self.services.replace(self.spec)


async def rearrange(moving: Sequence[Movable], *, others: Sequence[Movable], is_outdated: Callable[[], bool]) -> None:
    """Restart the generators of ``moving`` on their new cores, one after another.

    A ready generator is restarted only while another one is ready, and the next restart waits until it is ready again.

    Args:
        moving: Generators on outdated cores.
        others: Generators that stay or have just been started.
        is_outdated: Whether cores are about to be assigned again. If so, the remaining generators are not restarted.
    """

    async def until(happened: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until ``happened()`` is true. Return False if the new cores are outdated before that."""
        while not is_outdated():
            if await happened():
                return True
            await asyncio.sleep(_LOOK_EVERY_S)
        return False

    for generator in moving:
        rest = [other for other in (*moving, *others) if other is not generator]
        serves = await generator.is_ready()

        async def can_be_spared(rest: Sequence[Movable] = rest, generator: Movable = generator) -> bool:
            return not await generator.is_ready() or any([await other.is_ready() for other in rest])

        if not await until(can_be_spared):
            return
        await generator.move()
        if serves and not await until(generator.is_ready):
            return
