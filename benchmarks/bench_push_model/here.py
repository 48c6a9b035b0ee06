"""A real push of 111 million weights on this machine, beside its model with the rates of this machine.

    this process   LiveWeights --> SentDigests --> pack --> GlooCommunicator
                                                                  |  loopback
    a child        GlooWire --> receive_version --> StagedWeights, checksum --> copied, as when they are loaded

Left out are HTTP and vLLM, whose share `make bench-push` measures. Each round times every phase by itself, and then a
push. Times by the clock mean little on a machine that does other work; CPU seconds are compared too.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bench_push_model.course import course_s
from benchmarks.bench_push_model.models import SMALL, empty_model, filled_model
from benchmarks.bench_push_model.receiving_process import TIMEOUT_S, Timer
from benchmarks.bench_push_model.stand_ins import Sent, chunks_of
from services.trainer.policy.trained_weights import AllWeights, LiveWeights
from services.trainer.push.gloo_communicator import GlooCommunicator
from services.trainer.push.packing import SentDigests, announce, digest, pack
from services.trainer.push.transports import BUFFER_BYTES
from shared.weights.parameter_spec import Spec, total_bytes

Phases = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Round:
    """One push and each of its phases by itself: seconds by the clock, and of CPU in both processes together."""

    clock_s: dict[str, float]
    cpu_s: dict[str, float]


@dataclass(frozen=True)
class Here:
    """All rounds on this machine."""

    num_bytes: int
    rounds: list[Round]

    @property
    def clock_ratio(self) -> float:
        """The model's seconds over the push's, in the median round."""
        sent = Sent(LiveWeights(AllWeights(empty_model(*SMALL)), dtype=torch.bfloat16), buffer_bytes=BUFFER_BYTES)
        return statistics.median(modelled_s(sent, one.clock_s) / one.clock_s["push"] for one in self.rounds)

    @property
    def cpu_ratio(self) -> float:
        """The sum of the phases' CPU seconds over the push's, in the median round."""
        return statistics.median(sum(one.cpu_s.values()) / one.cpu_s["push"] - 1.0 for one in self.rounds)

    def median_s(self, phase: str) -> float:
        """Return the median seconds of a phase by the clock."""
        return statistics.median(one.clock_s[phase] for one in self.rounds)


def modelled_s(sent: Sent, phases_s: dict[str, float]) -> float:
    """Return the model's seconds for a push whose phases take these seconds each by itself.

    The threads of both processes share the cores, so it is at least their work divided by the number of cores.
    """
    size = total_bytes(sent.announced)
    chunks = chunks_of(
        sent,
        gather_rate=math.inf,
        memory_rate=sum(sent.moved_bytes) / (phases_s["convert"] + phases_s["pack"]),
        wire_rate=size / phases_s["send"],
        stage_rate=2 * size / phases_s["stage"],
        digest_rate=size / phases_s["digest"],
    )
    work_s = sum(phases_s[phase] for phase in ("convert", "pack", "sent_digest", "send", "stage", "digest"))
    cores = len(os.sched_getaffinity(0))
    course = course_s(chunks, num_buffers=2)
    return max(course, phases_s["sent_digest"], work_s / cores) + phases_s["load"]


def measure(*, num_rounds: int) -> Here:
    """Push ``num_rounds`` times, after one push that takes the memory."""
    torch.set_num_threads(1)
    weights = LiveWeights(AllWeights(filled_model(*SMALL)), dtype=torch.bfloat16)
    announced = announce(weights.described())
    body = {
        "buffer_bytes": BUFFER_BYTES,
        "names": [spec.name for spec in announced],
        "dtypes": [spec.dtype_name for spec in announced],
        "shapes": [spec.shape for spec in announced],
    }
    communicator = GlooCommunicator(address="127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.bench_push_model.receiving_process"]
    with subprocess.Popen(
        [*command, str(communicator.port), str(num_rounds + 1)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            json.dump(body, child.stdin)
            child.stdin.close()
            communicator.rendezvous(world_size=2, timeout_s=TIMEOUT_S)
            chunks = list(pack(weights(), announced, buffer_bytes=BUFFER_BYTES))
            rounds: list[Round] = []
            for _ in range(num_rounds + 1):
                communicator.confirm(timeout_s=TIMEOUT_S)
                timer = Timer()
                _time_phases(timer, weights, announced)
                communicator.confirm(timeout_s=TIMEOUT_S)
                timer.time("send", lambda: _broadcast(communicator, chunks))
                checksum = timer.time("push", lambda: _push(communicator, weights, announced))
                answer: dict[str, Any] = json.loads(child.stdout.readline())
                if answer["checksum"] != checksum:
                    raise SystemExit("the child did not receive what was sent")
                rounds.append(_round(timer.phases, answer["phases"]))
        finally:
            communicator.close()
            child.kill()
    return Here(total_bytes(announced), rounds[1:])


def _round(own: Phases, of_child: Phases) -> Round:
    cpu_s = {name: cpu for name, (_, cpu) in own.items()}
    for name, (_, cpu) in of_child.items():
        cpu_s[name] = cpu_s.get(name, 0.0) + cpu
    return Round({name: clock for name, (clock, _) in (of_child | own).items()}, cpu_s)


def _time_phases(timer: Timer, weights: LiveWeights, announced: tuple[Spec, ...]) -> None:
    """Time the phases that this process has by itself."""
    held = list(weights())
    timer.time("convert", lambda: deque(weights(), maxlen=0))
    timer.time("pack", lambda: deque(pack(held, announced, buffer_bytes=BUFFER_BYTES), maxlen=0))
    timer.time("sent_digest", lambda: [digest(tensor) for _, tensor in held])


def _broadcast(communicator: GlooCommunicator, chunks: list[torch.Tensor]) -> None:
    for chunk in chunks:
        communicator.broadcast(chunk, timeout_s=TIMEOUT_S)
    communicator.confirm(timeout_s=TIMEOUT_S)


def _push(communicator: GlooCommunicator, weights: LiveWeights, announced: tuple[Spec, ...]) -> str:
    """Push once as communicator_epochs.py does, and return the checksum of what was sent."""
    digests = SentDigests()
    for chunk in pack(digests.watching(weights()), announced, buffer_bytes=BUFFER_BYTES):
        communicator.broadcast(chunk, timeout_s=TIMEOUT_S)
    communicator.finish()
    checksum = digests.checksum()
    communicator.confirm(timeout_s=TIMEOUT_S)
    return checksum
