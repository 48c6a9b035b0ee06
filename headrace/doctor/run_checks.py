"""Checks the runs that have not ended, through the run API: their replicas, refusals and dead letters.

GET /v1/runs --runs that have not ended--> GET /v1/runs/{run_id}
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import quote

from headrace.asking import Answer, Asker, objects
from headrace.client import ENDED
from headrace.doctor.findings import Finding, note, ok, problem, unknown

_MAX_RUNS = 20
_RECENTLY_S = 86_400.0
_TROUBLE = frozenset({"restarting", "silent_rank", "push_failed", "disk"})
"""Values of ``waiting_kind`` that need a person. The others pass by themselves, or are checked here."""


@dataclass(frozen=True)
class LookedAtRuns:
    """The findings on the runs, and the data that other checks need. Ids and addresses that were not read are None."""

    findings: list[Finding] = field(default_factory=list[Finding])
    run_ids: frozenset[str] | None = None
    generators: dict[str, str] | None = None
    """Addresses of the generators that are registered and alive, by replica id."""
    num_rewarders: int = 0
    num_sessions: int = 0
    need_sessions: bool = True
    """False if every run that has not ended was looked at, and none has tools."""


async def look_at_runs(api_url: str, asker: Asker, *, key: str, long_gone: Collection[str] = ()) -> LookedAtRuns:
    """Examine the first 20 runs that have not ended, and recent failures. Return findings and the serving replicas.

    Args:
        api_url: The run API's URL, without a slash at the end.
        asker: Sends the requests.
        key: The API key; empty if doctor has none.
        long_gone: Ids of generators whose lease in Redis expired more than ten minutes ago.
    """
    if not key:
        return LookedAtRuns([note("runs", "list", "not looked at: doctor has no API key for the trainer")])
    listed = await asker.get_all(f"{api_url}/v1/runs?limit=100", "runs", key=key)
    if listed.status == HTTPStatus.UNAUTHORIZED:
        return LookedAtRuns([note("runs", "list", "not looked at: the trainer refuses doctor's API key")])
    if listed.status == HTTPStatus.FORBIDDEN:
        return LookedAtRuns([note("runs", "list", f"not looked at: {listed.detail}")])
    if listed.status != HTTPStatus.OK or not isinstance(listed.get("runs"), list):
        do = "correct the cause; the trainer's log says more"
        return LookedAtRuns([problem("runs", "list", f"GET /v1/runs{_what(listed)}", do)])
    runs = listed.objects("runs")
    failed = [finding for run in runs if (finding := _failed(run)) is not None]
    not_ended = [run for run in runs if run.get("status") not in ENDED]
    not_ended.sort(key=lambda run: run.get("status") == "queued")  # last: no generator or rewarder serves a queued run
    lasting = [str(run.get("run_id")) for run in not_ended]
    run_ids = frozenset(str(run.get("run_id")) for run in runs)
    if not lasting:
        return LookedAtRuns(
            [ok("runs", "list", "no run is queued, running or paused"), *failed], run_ids, need_sessions=False
        )
    details = await asyncio.gather(
        *(asker.get(f"{api_url}/v1/runs/{quote(run_id, safe='')}", key=key) for run_id in lasting[:_MAX_RUNS])
    )
    findings = [
        finding
        for run_id, detail in zip(lasting, details, strict=False)
        for finding in _of_answer(run_id, detail, long_gone)
    ]
    findings += failed
    if len(lasting) > _MAX_RUNS:
        findings.append(note("runs", "list", f"{len(lasting) - _MAX_RUNS} more runs were not looked at"))
    pages = [detail for detail in details if isinstance(detail.get("generators"), list)]
    alive = {
        str(one.get("replica_id")): str(one.get("url") or "").rstrip("/")
        for page in pages
        for one in page.objects("generators")
        if one.get("is_alive")
    }
    num_rewarders, num_sessions = (_most(pages, name) for name in ("num_rewarders", "num_sessions"))
    need_sessions = len(pages) < len(lasting) or any(page.get("num_sessions") is not None for page in pages)
    return LookedAtRuns(findings, run_ids, alive if pages else None, num_rewarders, num_sessions, need_sessions)


def _most(pages: list[Answer], name: str) -> int:
    return max((count for page in pages if isinstance(count := page.get(name), int)), default=0)


def _of_answer(run_id: str, detail: Answer, long_gone: Collection[str]) -> list[Finding]:
    if detail.status != HTTPStatus.OK or not isinstance(detail.body, dict):
        return [unknown(run_id, "run", f"GET /v1/runs/{run_id}{_what(detail)}", "look into the trainer's log")]
    return run_findings(run_id, cast("Mapping[str, Any]", detail.body), long_gone)


def run_findings(run_id: str, run: Mapping[str, Any], long_gone: Collection[str]) -> list[Finding]:
    """Return the findings on one run, from the answer of GET /v1/runs/{run_id}."""
    status, waiting_for = run.get("status"), str(run.get("waiting_for") or "")
    says = f"{status}" + (f", waiting for {waiting_for}" if waiting_for else "")
    findings = [ok(run_id, "run", says)]
    if run.get("waiting_kind") in _TROUBLE:
        do = f"look into {run.get('run_dir') or 'its directory'}/rank.log, and check the machine it is on"
        findings = [problem(run_id, "run", says, do)]
    elif status == "paused":
        findings = [_paused(run_id, run)]
    findings += _dead_letters(run_id, run)
    for refusal in objects(run.get("refusals")):
        findings.append(
            problem(
                run_id,
                "refusals",
                f"{refusal.get('kind')} {refusal.get('replica_id')} cannot serve it: {refusal.get('reason')}",
                "correct the cause; it tries again by itself, or when it is restarted",
            )
        )
    if status in ("running", "paused"):
        findings += _generators(run_id, run, long_gone)
        if run.get("num_rewarders") == 0:
            findings.append(
                problem(run_id, "rewarders", "no rewarder is alive for it", "start one, or look into its log")
            )
        if run.get("num_sessions") == 0:
            findings.append(
                problem(
                    run_id,
                    "sessions",
                    "it has tools, and no sessions replica plays it",
                    "start one, or look into its log",
                )
            )
    return findings


def _failed(run: Mapping[str, Any]) -> Finding | None:
    ended_at_s = run.get("ended_at_s")
    is_recent = isinstance(ended_at_s, int | float) and time.time() - ended_at_s < _RECENTLY_S
    if run.get("status") != "failed" or not is_recent:
        return None
    return note(str(run.get("run_id")), "run", f"failed within the last day: {run.get('reason')}")


def _paused(run_id: str, run: Mapping[str, Any]) -> Finding:
    pause = run.get("pause")
    by_rewards = isinstance(pause, dict) and cast("dict[str, Any]", pause).get("by") == "rewards"
    says = f"paused: {run.get('reason')}"
    if by_rewards:
        return problem(
            run_id,
            "run",
            says,
            "correct the reward function; the run tries a group from time to time, and goes on once it works",
        )
    return note(run_id, "run", says, f"`headrace resume {run_id}` continues it")


def _dead_letters(run_id: str, run: Mapping[str, Any]) -> list[Finding]:
    queues = run.get("queues")
    count = cast("dict[str, Any]", queues).get("dead_letters", 0) if isinstance(queues, dict) else 0
    if not count:
        return [ok(run_id, "dead letters", "no dead letters")]
    return [
        problem(
            run_id,
            "dead letters",
            f"{count} prompt groups killed the process that worked on them, or were malformed",
            f"GET /v1/runs/{run_id}/dead_letters says why; correct the cause, then replay them",
        )
    ]


def _generators(run_id: str, run: Mapping[str, Any], long_gone: Collection[str]) -> list[Finding]:
    generators = objects(run.get("generators"))
    gone = [str(one.get("replica_id")) for one in generators if not one.get("is_alive")]
    serving = [one for one in generators if one.get("is_alive") and not one.get("doing")]
    findings = [
        note(run_id, "generators", f"{name} took part, but its lease expired more than ten minutes ago")
        if name in long_gone
        else problem(
            run_id,
            "generators",
            f"{name} took part, but its lease has expired",
            "look into its log and start it again; other generators take over its prompts",
        )
        for name in gone
    ]
    findings += [
        note(run_id, "generators", f"{one.get('replica_id')} is {one.get('doing')}")
        for one in generators
        if one.get("is_alive") and one.get("doing")
    ]
    if serving:
        return [*findings, ok(run_id, "generators", f"generators registered and alive, by the run API: {len(serving)}")]
    if any(one.get("is_alive") for one in generators):
        return findings
    return [*findings, problem(run_id, "generators", "no generator is alive for it", "start one, or look into its log")]


def _what(answer: Answer) -> str:
    if not answer.status:
        return f": {answer.why}"
    return f" answers {answer.status}" + (f": {answer.detail}" if answer.detail else "")
