"""`headrace doctor` on deployments with one problem each: real sockets, scripted services."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.asking import Answer as Answered
from headrace.doctor.examination import examine
from headrace.doctor.findings import CANNOT_LOOK, FINE, PROBLEMS, exit_status
from headrace.doctor.service_checks import Service, door
from tests.headrace.doctor.doctor_rig import (
    ABOUT,
    API_KEY,
    INTERNAL_KEY,
    dripping_port,
    hanging_port,
    level,
    service,
    targets,
    wrong,
)
from tests.headrace.scripted_api import HANG_UP, Answer, Asked, problem, serving
from tests.kept_ports import kept_port


async def test_services_that_agree_are_fine() -> None:
    with (
        service("trainer") as trainer,
        service("rewarder") as rewarder,
        service("sessions", torch=None, nccl=None, num_gpus=0) as sessions,
        service("generator") as generator,
    ):
        found = await examine(
            targets(
                api_url=trainer.url,
                rewarder_urls=(rewarder.url,),
                sessions_urls=(sessions.url,),
                generator_urls=(generator.url,),
            )
        )
    assert wrong(found) == {}
    assert exit_status(found.findings) == FINE
    assert level(found, "trainer, generators", "NCCL") == "ok"
    assert level(found, "sessions", "internal key") == "ok"
    assert level(found, "services asked", "asked") == "ok"
    assert set(found.services) == {"trainer", "rewarder", "sessions", "generator"}


async def test_a_closed_port_is_one_finding_and_not_six() -> None:
    found = await examine(targets(api_url=f"http://127.0.0.1:{kept_port()}"))
    assert list(wrong(found)) == [("trainer", "reachable")]
    assert exit_status(found.findings) == PROBLEMS


async def test_services_that_hang_are_given_up_after_the_time_out_all_at_once() -> None:
    with hanging_port() as one, hanging_port() as other, hanging_port() as third:
        began_at = time.monotonic()
        found = await examine(
            targets(
                api_url=f"http://127.0.0.1:{one}",
                rewarder_urls=(f"http://127.0.0.1:{other}",),
                redis_url=f"redis://127.0.0.1:{third}/0",
                timeout_s=0.5,
            )
        )
    assert time.monotonic() - began_at < 60
    assert {where for where, _ in wrong(found)} == {"trainer", "rewarder", "redis"}
    assert all("did not answer within 0.5 s" in says for says in wrong(found).values())


async def test_a_server_that_drips_is_given_up_too() -> None:
    """Each byte arrives in time, but the response never ends."""
    with dripping_port() as port:
        found = await examine(targets(api_url=f"http://127.0.0.1:{port}", timeout_s=1.0))
    assert "did not answer within 1 s" in wrong(found)["trainer", "reachable"]


@pytest.mark.parametrize("answer", [HANG_UP, Answer(404, b"<html>nginx</html>", "text/html")])
async def test_something_else_on_the_port_is_a_sentence(answer: Any) -> None:
    with service("trainer", {"/livez": answer}) as api:
        found = await examine(targets(api_url=api.url))
    assert list(wrong(found)) == [("trainer", "reachable")]


async def test_a_generator_given_as_rewarder_is_named() -> None:
    with service("generator") as api:
        found = await examine(targets(rewarder_urls=(api.url,)))
    assert "is a generator, not a rewarder" in wrong(found)["rewarder", "reachable"]


async def test_a_mistaken_address_is_one_finding_whatever_else_it_answers() -> None:
    """The generator has no run routes, and a wrong path is a 404 on every service."""
    with service("generator", {"/v1/runs": problem(404, "Not found.")}) as api:
        mistaken = await examine(targets(api_url=api.url))
        too_long = await examine(targets(api_url=f"{api.url}/v1"))
    for found in (mistaken, too_long):
        assert [one.check for one in found.findings if one.where in ("trainer", "runs")] == ["reachable"]
    assert list(wrong(too_long)) == [("trainer", "reachable")]


async def test_a_missing_list_of_runs_is_reported_in_a_sentence() -> None:
    with service("trainer", {"/v1/runs": HANG_UP}) as api:
        found = await examine(targets(api_url=api.url))
    assert wrong(found)["runs", "list"].startswith(
        "GET /v1/runs: the server there closes the connection without an answer"
    )


async def test_https_to_an_http_server_is_distinguished_from_a_closed_port() -> None:
    with service("trainer") as api:
        found = await examine(targets(api_url=api.url.replace("http://", "https://")))
    assert "does not speak TLS: write http://" in wrong(found)["trainer", "reachable"]


async def test_a_service_that_is_not_ready_says_why() -> None:
    waiting = Answer(503, b'{"status": "waiting", "reason": "loading the model"}')
    with (
        service("trainer", {"/readyz": problem(503, "Redis does not answer.")}) as trainer,
        service("generator", {"/readyz": waiting}) as generator,
    ):
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert wrong(found)["trainer", "ready"] == "not ready: Redis does not answer."
    assert level(found, "generator", "ready") == "note"


@pytest.mark.parametrize(
    ("key", "what", "services"),
    [
        ("api_key", "API key", ["trainer", "rewarder", "sessions", "generator"]),
        ("internal_key", "internal key", ["trainer", "sessions", "generator"]),
    ],
)
async def test_a_key_that_everybody_refuses_is_doctors_own_and_said_once(
    key: str, what: str, services: list[str]
) -> None:
    with (
        service("trainer") as trainer,
        service("rewarder") as rewarder,
        service("sessions") as sessions,
        service("generator") as generator,
    ):
        found = await examine(
            targets(
                api_url=trainer.url,
                rewarder_urls=(rewarder.url,),
                sessions_urls=(sessions.url,),
                generator_urls=(generator.url,),
                **{key: "another", f"{key}_source": "HEADRACE_OF_DOCTOR"},
            )
        )
    assert wrong(found) == {
        ("doctor", what): f"none of {len(services)} services that were asked takes the {what} that doctor was given in "
        f"HEADRACE_OF_DOCTOR: {', '.join(services)}"
    }


async def test_the_only_service_that_refuses_a_key_is_named() -> None:
    with service("trainer") as trainer, serving(lambda asked: refuses_keys(asked, "rewarder")) as rewarder:
        found = await examine(targets(api_url=trainer.url, rewarder_urls=(rewarder.url,)))
    assert list(wrong(found)) == [("rewarder", "API key")]


def refuses_keys(asked: Asked, kind: str) -> Any:
    """Return the responses of a service that refuses our keys."""
    return {"service": kind} if asked.path in ("/livez", "/readyz") else problem(401, "Send the header.")


async def test_checks_that_a_refused_key_prevents_are_reported() -> None:
    with serving(lambda asked: refuses_keys(asked, "trainer")) as api:
        refused = await examine(targets(api_url=api.url, internal_key=""))
        missing = await examine(targets(api_url=api.url, api_key="", internal_key=""))
    for found, why in ((refused, "refuses doctor's API key"), (missing, "doctor has no API key")):
        (runs,) = [one for one in found.findings if one.where == "runs"]
        assert (runs.level, why in runs.says) == ("note", True)
        (asked,) = [one for one in found.findings if one.where == "services asked"]
        assert asked.says == (
            "0 of at least 2; trainer did not report; releases, GPUs and disks of the others were not looked at"
        )


async def test_nothing_is_claimed_about_services_that_were_not_asked() -> None:
    """Only with the API key and the run API, as for users of Compose and Kubernetes."""
    generators = [{"replica_id": f"g{number}", "is_alive": number < 5, "doing": ""} for number in range(6)]
    replicas = {"num_rewarders": 1, "num_sessions": 2, "generators": generators}
    page = {"run_id": "run-a", "status": "running", **replicas}
    with service("trainer", {"/v1/runs": {"runs": [page]}, "/v1/runs/run-a": page}, num_gpus=0) as api:
        found = await examine(targets(api_url=api.url))
    said = {(one.where, one.check): (one.level, one.says) for one in found.findings}
    assert said["services asked", "asked"] == (
        "note", "1 of 9: trainer; releases, GPUs and disks of the others were not looked at"
    )  # fmt: skip
    assert said["generators", "reachable"] == ("note", "not looked at: g0, g1, g2, g3, g4")
    assert said["services asked", "GPUs"][1].startswith("none is visible to trainer: ")
    assert said["clocks", "clocks"][1].startswith("the clocks of trainer and this machine differ")
    assert not any("all services" in one.says or "at work" in one.says for one in found.findings)
    serving_it = [one.says for one in found.findings if one.where == "run-a" and one.level == "ok"]
    assert "generators registered and alive, by the run API: 5" in serving_it


async def test_when_all_were_asked_doctor_says_all_even_where_a_generator_was_named_by_its_address() -> None:
    with service("rewarder") as rewarder, service("generator") as generator:
        alive = [{"replica_id": "g0", "is_alive": True, "doing": "", "url": generator.url}]
        page = {"run_id": "run-a", "status": "running", "num_rewarders": 1, "generators": alive}
        answers = {"/v1/runs": {"runs": [page]}, "/v1/runs/run-a": page}
        with service("trainer", answers) as trainer:
            found = await examine(
                targets(api_url=trainer.url, rewarder_urls=(rewarder.url,), generator_urls=(generator.url,))
            )
    assert level(found, "services asked", "asked") == "ok"
    assert "generators" not in {one.where for one in found.findings}


async def test_the_first_date_of_a_service_that_stood_still_is_not_its_clock() -> None:
    def script(asked: Asked) -> Any:
        api.clock_ahead_s = -75.0 if [one.path for one in api.asked].count("/livez") == 1 else 0.0
        return {"status": "ready"} if asked.path in ("/livez", "/readyz") else {"service": "trainer", **ABOUT}

    with serving(script) as api:
        found = await examine(targets(api_url=api.url))
    assert {one.level for one in found.findings if one.check in ("clock", "clocks")} == {"ok"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (problem(404, "Not found."), "unknown"),
        (Answer(200, b"<html>hello</html>", "text/html"), "unknown"),
        (Answer(302, b"", location="http://127.0.0.1:1/login"), "problem"),
        (problem(403, "Not from here."), "problem"),
        (problem(500, "Internal error."), "problem"),
    ],
)
@pytest.mark.parametrize("key", ["API key", "internal key"])
async def test_a_key_counts_as_taken_only_where_a_headrace_service_answers(
    key: str, answer: Answer, expected: str
) -> None:
    """Another application that also answers /livez; a proxy that hides the internal routes."""
    prefix = "/internal/" if key == "internal key" else "/v1/about"

    def script(asked: Asked) -> Any:
        if asked.path in ("/livez", "/readyz"):
            return {}
        if asked.path.startswith(prefix):
            return answer
        if asked.headers.get("authorization") not in (f"Bearer {API_KEY}", f"Bearer {INTERNAL_KEY}"):
            return problem(401, "no key")
        return {"runs": []} if asked.path.startswith("/v1/runs") else {"service": "trainer", **ABOUT}

    with serving(script) as api:
        found = await examine(targets(api_url=api.url))
    assert level(found, "trainer", key) == expected
    other = "API key" if key == "internal key" else "internal key"
    assert level(found, "trainer", other) == "ok"
    assert exit_status(found.findings) != FINE


async def test_a_key_without_the_read_scope_is_distinguished_from_a_refused_key() -> None:
    detail = "This needs a key with the scope read; the key ci has infer. Use a key that has it."
    refused = Answer(403, json.dumps({"status": 403, "detail": detail, "missing_scope": "read"}).encode())
    with service("trainer", {"/v1/runs": refused, "/v1/about": refused}) as trainer:
        found = await examine(targets(api_url=trainer.url))
    assert not wrong(found)
    assert exit_status(found.findings) == CANNOT_LOOK
    assert level(found, "trainer", "API key") == "unknown"
    (one,) = [finding for finding in found.findings if (finding.where, finding.check) == ("trainer", "API key")]
    assert one.says == f"takes the API key, which lacks the scope read: {detail}"
    assert one.do == "give doctor a key with the scope read"
    (runs,) = [finding for finding in found.findings if finding.where == "runs"]
    assert runs.says == f"not looked at: {detail}"


async def test_without_an_api_key_doctor_reports_that_it_cannot_check() -> None:
    with service("trainer") as api:
        found = await examine(targets(api_url=api.url, api_key=""))
    assert wrong(found) == {}
    assert level(found, "trainer", "API key") == "unknown"
    assert exit_status(found.findings) == CANNOT_LOOK


async def test_a_service_that_needs_no_key_is_known_on_loopback_and_wrong_elsewhere() -> None:
    with serving(lambda _: {"service": "trainer", **ABOUT, "runs": []}) as api:
        found = await examine(targets(api_url=api.url))
    assert level(found, "trainer", "asks for a key") == "note"
    elsewhere = Service("trainer", "trainer", "http://trainer:8400")
    assert door(elsewhere, Answered(200), Answered(200)).level == "problem"
    assert door(elsewhere, Answered(401), Answered(200)).level == "problem"
    assert door(elsewhere, Answered(401), Answered(401)).level == "ok"


@pytest.mark.parametrize(
    ("about", "check", "says"),
    [
        ({"headrace": "0.0.9"}, ("services asked", "releases"), "0.0.9 (generator)"),
        ({"wire": 2}, ("services asked", "wire"), "2 (generator)"),
        ({"torch": "2.12.1+cu130"}, ("trainer, generators", "torch"), "2.12.1 (generator); 2.13.0 (trainer)"),
        ({"nccl": "2.28.9"}, ("trainer, generators", "NCCL"), "2.28.9 (generator); 2.29.7 (trainer)"),
        ({"num_gpus": 0}, ("generator", "GPUs"), "sees no GPU, but others do"),
    ],
)
async def test_releases_and_gpus_that_do_not_fit_together_are_named(
    about: dict[str, Any], check: tuple[str, str], says: str
) -> None:
    with service("trainer") as trainer, service("generator", **about) as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert list(wrong(found)) == [check]
    assert says in wrong(found)[check]


async def test_the_remedy_for_a_missing_gpu_names_variables_of_the_compose_file_and_keys_of_the_chart() -> None:
    with service("trainer") as trainer, service("generator", num_gpus=0) as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    (finding,) = [one for one in found.findings if (one.where, one.check) == ("generator", "GPUs")]
    deploy = Path(__file__).parents[3] / "deploy"
    variables = re.findall(r"HEADRACE_\w+", finding.do)
    assert variables
    assert all(f"${{{name}:-" in (deploy / "docker-compose.yml").read_text() for name in variables)
    values = yaml.safe_load((deploy / "helm" / "headrace" / "values.yaml").read_text())
    keys = re.findall(r"\b(trainer|generator)\.(\w+)", finding.do)
    assert keys
    assert all(key in values[workload] for workload, key in keys)


@pytest.mark.parametrize(("what", "untold"), [("NCCL", "nccl"), ("torch", "torch")])
async def test_a_release_that_one_side_does_not_report_is_not_taken_for_equal(what: str, untold: str) -> None:
    about: dict[str, Any] = {untold: None}
    with service("trainer") as trainer, service("generator", **about) as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    (one,) = [finding for finding in found.findings if finding.check == what]
    assert one.level == "note"
    assert f"generator: pip does not know {what} there" in one.says
    assert wrong(found) == {}


async def test_the_build_of_torch_may_differ() -> None:
    with service("trainer", torch="2.13.0+cu129") as trainer, service("generator") as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("disk", "is_wrong"),
    [
        ({"free_bytes": 10 << 30, "checkpoint_bytes": 9 << 30}, False),
        ({"free_bytes": 9 << 30, "checkpoint_bytes": 9 << 30}, True),
        ({"free_bytes": 99 << 30, "is_writable": False}, True),
        ({"free_bytes": 1 << 20}, False),
    ],
)
async def test_a_disk_without_room_for_the_next_checkpoint_is_wrong(disk: dict[str, Any], is_wrong: bool) -> None:
    whole = {"path": "/runs", "is_writable": True, "total_bytes": 100 << 30, **disk}
    with service("trainer", runs_disk=whole) as api:
        found = await examine(targets(api_url=api.url))
    assert (("trainer", "disk") in wrong(found)) == is_wrong


@pytest.mark.parametrize(("ahead_s", "says"), [(3600.0, "3600 s ahead"), (-3600.0, "3599 s behind")])
async def test_a_wrong_clock_is_distinguished_from_correct_clocks(ahead_s: float, says: str) -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder:
        rewarder.clock_ahead_s = ahead_s
        found = await examine(targets(api_url=trainer.url, rewarder_urls=(rewarder.url,)))
    assert list(wrong(found)) == [("rewarder", "clock")]
    number, direction = says.split(" s ")
    assert direction in wrong(found)["rewarder", "clock"]
    assert any(f"{int(number) + off} s" in wrong(found)["rewarder", "clock"] for off in (-1, 0, 1))


async def test_when_only_doctors_own_clock_is_wrong_no_service_is_blamed() -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder, service("generator") as generator:
        for api in (trainer, rewarder, generator):
            api.clock_ahead_s = 500.0
        found = await examine(
            targets(api_url=trainer.url, rewarder_urls=(rewarder.url,), generator_urls=(generator.url,))
        )
    assert wrong(found) == {}
    assert level(found, "doctor", "clock") == "note"
    (fine,) = [one for one in found.findings if one.check == "clocks"]
    assert "this machine" not in fine.says


async def test_an_endpoint_whose_breaker_is_open_is_named_with_what_it_said() -> None:
    functions = [
        {"name": "judge", "kind": "endpoint", "warning": ""},
        {"name": "fine", "kind": "endpoint", "warning": ""},
        {"name": "accuracy_reward", "kind": "built-in", "warning": ""},
    ]
    answers = {
        "/v1/rewards": {"reward_funcs": functions},
        "/v1/rewards/judge": {"state": {"breaker": "open", "detail": "it failed 5 times in a row (timeout)"}},
        "/v1/rewards/fine": {"state": {"breaker": "closed", "detail": ""}},
    }
    with service("rewarder", answers) as api:
        found = await examine(targets(rewarder_urls=(api.url,)))
        asked = {one.path for one in api.asked}
    says = wrong(found)["rewarder", "reward endpoints"]
    assert says == "judge is left alone for now: it failed 5 times in a row (timeout)"
    assert "/v1/rewards/accuracy_reward" not in asked


@pytest.mark.parametrize("body", [{"runs": 7}, {"runs": [7, None]}, [], {"runs": [{"run_id": "run-a", "queues": 1}]}])
async def test_answers_that_make_no_sense_end_in_sentences(body: Any) -> None:
    with service("trainer", {"/v1/runs": body, "/v1/runs/run-a": [1]}, torch=7) as api:
        found = await examine(targets(api_url=api.url))
    assert "does not answer like a headrace service" in wrong(found)["trainer", "releases"]
