"""The launcher of several ranks: which exit status it returns, what it says, and that no rank outlives it."""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.local.process_table import mark, wait_until_gone
from services.trainer.supervision.rank_launcher import Node, launch
from services.trainer.supervision.rank_rendezvous import BoundRendezvous
from tests.eventually import eventually
from tests.trainer.policy.sharded_steps import start


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Restore this process's signal handlers, which torchrun replaces."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("run_id", ["run-a", "run-b"])
def test_only_launchers_of_one_run_meet(run_id: str) -> None:
    first = BoundRendezvous(host="127.0.0.1", port=0, node_rank=0, num_nodes=2, run_id="run-a", timeout_s=120)
    port = int(first.store.port)
    second = BoundRendezvous(host="127.0.0.1", port=port, node_rank=1, num_nodes=2, run_id=run_id, timeout_s=120)
    store = first.next_rendezvous().store
    store.set("torchelastic/role_info/0", "x")
    assert store.check(["torchelastic/role_info/0"])  # waits until the store has the key: it acknowledges no set()
    assert second.next_rendezvous().store.check(["torchelastic/role_info/0"]) is (run_id == "run-a")


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("statuses", "status", "said"),
    [
        ((0, 0), 0, ""),
        # torchrun ends the other rank, unless that one ends first.
        ((2, 0), 2, r"exit statuses by rank: \{0: 2(, 1: -15)?\}"),
        ((3, 0), 3, r"exit statuses by rank: \{0: 3(, 1: -15)?\}"),
        ((0, 1), 1, r"exit statuses by rank: \{(0: -15, )?1: 1\}"),
        ((0, -9), 1, "training rank 1 was killed by signal 9"),
    ],
)
def test_exit_statuses_of_ranks_keep_their_meaning(
    statuses: tuple[int, int], status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"import os, sys; s = {statuses}[int(os.environ['RANK'])]; s < 0 and os.kill(os.getpid(), -s); sys.exit(s)"
    node = Node("run-x", 2, 1, 0, "127.0.0.1:0", (sys.executable, "-S", "-c", code), timeout_s=20, stop_grace_s=20)
    assert launch(node) == status
    assert re.search(said, caplog.messages[-1] if status else "")


@pytest.mark.usefixtures("own_signals")
def test_the_launcher_says_what_the_failing_rank_said_and_not_what_its_victims_saw(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As with real ranks, the victim notices nothing before the other rank has reported why it ends.
    code = (
        "import os, pathlib, sys, time\n"
        "from services.trainer.ranks.rank_words import leave_word\n"
        "said, rank = pathlib.Path(sys.argv[1]), int(os.environ['RANK'])\n"
        "while rank == 0 and not said.exists(): time.sleep(0.01)\n"
        "leave_word(['lost the others', 'out of memory'][rank], status=1, is_loss=rank == 0)\n"
        "said.touch()\n"
        "sys.exit(1)\n"
    )
    command = (sys.executable, "-c", code, str(tmp_path / "said"))
    assert launch(Node("run-x", 2, 1, 0, "127.0.0.1:0", command, timeout_s=20, stop_grace_s=20)) == 1
    assert caplog.messages[-1].endswith("started again: training rank 1: out of memory")


@pytest.mark.usefixtures("own_signals")
def test_a_rendezvous_on_an_address_of_another_machine_is_refused_with_a_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = Node("run-x", 1, 2, 0, "192.0.2.1:1", (sys.executable, "-c", "pass"), timeout_s=20, stop_grace_s=20)
    assert launch(node) == 2
    assert "cannot meet at 192.0.2.1:1" in caplog.messages[-1]


@pytest.mark.usefixtures("own_signals")
def test_a_rendezvous_at_a_name_that_leads_nowhere_yet_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """After a pod was replaced, its name may still resolve to the old pod, or to nothing, because DNS is cached."""
    node = Node("run-x", 1, 2, 0, "trainer-0.invalid:1", (sys.executable, "-c", "pass"), timeout_s=20, stop_grace_s=20)
    assert launch(node) == 1
    assert "trainer-0.invalid does not resolve to this machine" in caplog.messages[-1]


async def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from services.trainer.ranks.rank_group import die_with_launcher\n"
        "die_with_launcher()\n"
        "(pathlib.Path(sys.argv[1]) / os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    launcher = start(tmp_path, num_ranks=2, worker=[sys.executable, "-c", code])
    try:
        await eventually(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        ranks = [mark(int((tmp_path / rank).read_text())) for rank in "01"]
        assert None not in ranks
    finally:
        launcher.kill()
        launcher.communicate(timeout=120)
    assert wait_until_gone([rank for rank in ranks if rank is not None], timeout_s=10) == []
