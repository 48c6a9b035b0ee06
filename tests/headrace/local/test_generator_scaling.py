"""Generators move one after another, and the run is served all the time."""

import asyncio

import pytest

from headrace.local import generator_scaling
from headrace.local.generator_scaling import GeneratorScaling, rearrange
from headrace.local.launch_ports import Doors
from headrace.local.running_services import RunningServices
from headrace.local.supervised_process import ServiceSpec
from shared.errors import UserError

pytestmark = pytest.mark.unit


class Generator:
    """Plays a generator that is not ready for a while after a move."""

    def __init__(self, fleet: list["Generator"], *, is_serving: bool = True, comes_back: bool = True) -> None:
        self.is_serving = is_serving
        self.num_moves = 0
        self.num_left_when_moved: int | None = None
        self._comes_back = comes_back
        self._fleet = fleet
        fleet.append(self)

    async def is_ready(self) -> bool:
        await asyncio.sleep(0)
        return self.is_serving

    async def move(self) -> None:
        self.num_moves += 1
        self.is_serving = False
        self.num_left_when_moved = sum(other.is_serving for other in self._fleet)
        if self._comes_back:
            asyncio.get_running_loop().call_later(0.02, self.serve)

    def serve(self) -> None:
        self.is_serving = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_scaling, "_LOOK_EVERY_S", 0.001)


async def test_all_but_one_serve_at_any_time() -> None:
    fleet: list[Generator] = []
    moving = [Generator(fleet) for _ in range(3)]
    staying = Generator(fleet)
    await rearrange(moving, others=[staying], is_outdated=lambda: False)
    assert [generator.num_moves for generator in fleet] == [1, 1, 1, 0]
    assert [generator.num_left_when_moved for generator in moving] == [3, 3, 3]


async def test_the_only_one_that_serves_waits_for_a_new_one() -> None:
    fleet: list[Generator] = []
    old, new = Generator(fleet), Generator(fleet, is_serving=False)
    asyncio.get_running_loop().call_later(0.05, new.serve)
    await rearrange([old], others=[new], is_outdated=lambda: False)
    assert (old.num_moves, old.num_left_when_moved) == (1, 1)


async def test_without_a_run_the_launcher_waits_for_no_generator() -> None:
    fleet: list[Generator] = []
    moving = [Generator(fleet, is_serving=False, comes_back=False) for _ in range(2)]
    await asyncio.wait_for(rearrange(moving, others=[], is_outdated=lambda: False), timeout=120)
    assert [generator.num_moves for generator in moving] == [1, 1]


async def test_no_generator_moves_after_places_are_assigned_again() -> None:
    fleet: list[Generator] = []
    first, second = Generator(fleet, comes_back=False), Generator(fleet)
    staying = Generator(fleet)
    moved = asyncio.create_task(
        rearrange([first, second], others=[staying], is_outdated=lambda: first.num_moves == 1 and outdated.is_set())
    )
    outdated = asyncio.Event()
    while not first.num_moves:  # noqa: ASYNC110  as a poll of another process
        await asyncio.sleep(0.001)
    assert not moved.done()
    outdated.set()
    await asyncio.wait_for(moved, timeout=120)
    assert (first.num_moves, second.num_moves) == (1, 0)


async def test_generators_without_a_gpu_are_not_started_and_the_reason_is_said() -> None:
    said: list[str] = []

    def refuse(number: int) -> None:
        raise UserError(f"{number} generators need {number} GPUs")

    def not_called(*_: object) -> ServiceSpec:
        raise AssertionError("a generator would be started")

    def not_refused(*_: object) -> None:
        raise AssertionError("a service has refused to run")

    async def is_ready(_: str) -> bool:
        return True

    doors: list[Doors] = []
    async with asyncio.TaskGroup() as tasks:
        services = RunningServices(
            tasks, say=said.append, on_start=lambda: None, on_refusal=not_refused, hurry=asyncio.Event()
        )
        scaling = GeneratorScaling(
            services, doors, metrics_port=0, scheme="http", check=refuse, make_spec=not_called, is_ready=is_ready,
            say=said.append,
        )  # fmt: skip
        assert await scaling.scale(4) is None
    assert (said, doors) == (["generators: 0, as before: 4 generators need 4 GPUs"], [])
