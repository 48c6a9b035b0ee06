"""Metrics and rollouts, as they are in the run's directory, and dead letters."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.trainer.run_api.trainer_api import TrainerApi
from shared.redis.keys import RunKeys

Run = dict[str, Any]


@pytest.fixture
async def run_dir(client: httpx.AsyncClient, run: Run) -> Path:
    """Return the directory of a submitted run."""
    return Path((await client.post("/v1/runs", json=run)).json()["run"]["run_dir"])


async def test_metrics_come_in_pages_of_steps(client: httpx.AsyncClient, run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "reward": 0.{n}}}\n' for n in range(1, 6)))
    path = f"/v1/runs/{run_dir.name}/metrics"
    first = (await client.get(path, params={"limit": "2"})).json()
    assert first["metrics"] == [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    rest = (await client.get(path, params={"cursor": first["next_cursor"]})).json()
    assert [line["step"] for line in rest["metrics"]] == [3, 4, 5]
    assert rest["next_cursor"] is None
    above = (await client.get(path, params={"after_step": "4"})).json()
    assert [line["step"] for line in above["metrics"]] == [5]


async def test_evaluations_come_in_pages_of_the_steps_they_began_at(client: httpx.AsyncClient, run_dir: Path) -> None:
    (run_dir / "evaluations.jsonl").write_text("".join(f'{{"step": {n}, "eval_reward": 0.5}}\n' for n in (0, 10, 20)))
    path = f"/v1/runs/{run_dir.name}/evaluations"
    first = (await client.get(path, params={"limit": 2})).json()
    assert [line["step"] for line in first["evaluations"]] == [0, 10]
    rest = (await client.get(path, params={"cursor": first["next_cursor"]})).json()
    evaluations = [{"step": 20, "eval_reward": 0.5}]
    assert rest == {"run_id": run_dir.name, "evaluations": evaluations, "next_cursor": None}


async def test_a_run_says_in_words_what_looks_wrong_in_its_metrics(client: httpx.AsyncClient, run_dir: Path) -> None:
    path = f"/v1/runs/{run_dir.name}"
    assert (await client.get(path)).json()["warnings"] == []
    line = {"reward": 0.0, "frac_reward_zero_std": 1.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line | {"step": n}) + "\n" for n in range(1, 8)))
    (warning,) = (await client.get(path)).json()["warnings"]
    assert warning["kind"] == "nothing_learned"
    assert warning["says"].startswith("nothing was learned in the last 7 batches")


async def test_a_run_without_metrics_has_none_yet(client: httpx.AsyncClient, run_dir: Path) -> None:
    found = (await client.get(f"/v1/runs/{run_dir.name}/metrics")).json()
    assert found == {"run_id": run_dir.name, "metrics": [], "next_cursor": None}


async def test_a_torn_line_is_skipped_and_nan_is_null(client: httpx.AsyncClient, run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n[]\n{"step": 2, "lo')
    shown = (await client.get(f"/v1/runs/{run_dir.name}/metrics")).json()
    assert shown["metrics"] == [{"step": 1, "loss": None}]


async def test_rollouts_are_of_the_newest_step_unless_one_is_asked_for(
    client: httpx.AsyncClient, run_dir: Path
) -> None:
    (run_dir / "rollouts").mkdir()
    for step in (1, 2, 10):
        rows = [{"step": step, "branch": n, "completion": "7", "reward": 1.0} for n in range(3)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run_dir / "rollouts" / f"step_{step:08d}.jsonl").write_text(text)
    (run_dir / "rollouts" / "step_00000011.tmp").write_text("half")
    path = f"/v1/runs/{run_dir.name}/rollouts"
    newest = (await client.get(path)).json()
    assert (newest["step"], newest["newest_step"], len(newest["rollouts"]), newest["next_cursor"]) == (10, 10, 3, None)
    page = (await client.get(path, params={"step": "2", "limit": "2"})).json()
    assert [row["branch"] for row in page["rollouts"]] == [0, 1]
    rest = (await client.get(path, params={"cursor": page["next_cursor"]})).json()
    assert (rest["step"], [row["branch"] for row in rest["rollouts"]]) == (2, [2])
    other = await client.get(path, params={"step": "1", "cursor": page["next_cursor"]})
    assert (other.status_code, other.json()["type"]) == (400, "/problems/bad-cursor")
    missing = await client.get(path, params={"step": "3"})
    assert missing.status_code == 404
    assert "rollouts of 3 steps, 1 to 10" in missing.json()["detail"]


async def test_a_run_without_rollouts_has_none_yet(client: httpx.AsyncClient, run_dir: Path) -> None:
    path = f"/v1/runs/{run_dir.name}/rollouts"
    nothing: dict[str, Any] = {
        "run_id": run_dir.name,
        "step": None,
        "newest_step": None,
        "rollouts": [],
        "next_cursor": None,
    }
    assert (await client.get(path)).json() == nothing
    assert "none yet" in (await client.get(path, params={"step": "1"})).json()["detail"]


async def test_many_dead_letters_are_read_in_small_parts(
    client: httpx.AsyncClient, run_dir: Path, api: TrainerApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        await api.redis.xadd(RunKeys(run_dir.name).dead, {"group_id": f"{number:08d}", "payload": b"torn"})
    asked: list[int] = []
    xrange = api.redis.xrange

    async def counting(*arguments: Any, **options: Any) -> Any:
        asked.append(options["count"])
        return await xrange(*arguments, **options)

    monkeypatch.setattr(api.redis, "xrange", counting)
    path = f"/v1/runs/{run_dir.name}/dead_letters"
    page = (await client.get(path, params={"limit": "35"})).json()
    assert [letter["group_id"] for letter in page["dead_letters"]] == [f"{number:08d}" for number in range(35)]
    rest = (await client.get(path, params={"cursor": page["next_cursor"]})).json()
    assert [letter["group_id"] for letter in rest["dead_letters"]] == [f"{number:08d}" for number in range(35, 40)]
    assert rest["next_cursor"] is None
    assert max(asked) <= 16
