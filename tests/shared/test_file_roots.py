"""A run may name files below the operator's roots. A message about any other file reveals nothing."""

import os
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.generator.engine.engine_check import EngineChecker
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.receiving import SimulatedReceivingEngine
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.trainer.settings import TrainerSettings
from shared.control import JoinRequest
from shared.errors import PushError, UserError
from shared.files.file_roots import FileRoots, default_roots, default_weight_roots, parse_roots
from shared.run_options.run_config import RunConfig
from shared.run_options.run_places import misplaced
from shared.settings import ServiceSettings

pytestmark = pytest.mark.unit


def why_not(roots: FileRoots, path: object, *, whole: bool = False) -> str:
    try:
        roots.require(str(path), field="f", whole=whole)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture
def roots(tmp_path: Path) -> FileRoots:
    for name in ("data/model", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data/rows.jsonl", "other/secret", "data/model/config.json"):
        (tmp_path / name).write_text("{}")
    return FileRoots((str(tmp_path / "data"), "s3://bucket/weights"), "HEADRACE_DATA_ROOTS")


def test_a_path_below_a_root_is_allowed_and_a_link_within_it_too(roots: FileRoots, tmp_path: Path) -> None:
    (tmp_path / "data" / "link.jsonl").symlink_to(tmp_path / "data" / "rows.jsonl")
    (tmp_path / "data" / "model" / "tokenizer.json").symlink_to("config.json")
    for name in ("rows.jsonl", "link.jsonl", "not-yet-there", "model", ""):
        assert why_not(roots, tmp_path / "data" / name, whole=True) == ""
    assert why_not(roots, f"file://{tmp_path}/data/rows.jsonl") == ""


def test_the_refusal_does_not_reveal_whether_a_path_exists(roots: FileRoots, tmp_path: Path) -> None:
    there, missing = (why_not(roots, tmp_path / "other" / name) for name in ("secret", "SECRET"))
    assert there.replace("secret", "SECRET") == missing
    assert "is not in a place that runs may name; HEADRACE_DATA_ROOTS of this service names " in there


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow", "/etc/cron.d", "{top}/data/../other/secret", "{top}/data-too", "{top}", "/", "", "relative",
        "file:///etc/shadow", "file://{top}/other", "/proc/self/root{top}/data/rows.jsonl", "{top}//data/../../etc",
        "s3://bucket/weights-too", "s3://bucket", "s3://other/weights", "gs://bucket/weights", "http://127.0.0.1/x",
        "s3://bucket/weights/../../other", "//{top}/other", "{top}/data\0/../other", "memory://x", "S3://bucket/weights",
    ],
)  # fmt: skip
def test_a_path_outside_the_roots_is_refused(roots: FileRoots, tmp_path: Path, path: str) -> None:
    assert why_not(roots, path.replace("{top}", str(tmp_path)))


def test_a_link_out_of_the_roots_is_refused_wherever_it_stands(roots: FileRoots, tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    (data / "out.jsonl").symlink_to(other / "secret")
    (data / "folder").symlink_to(other)
    (data / "chain").symlink_to("folder")
    (data / "model" / "tokenizer.json").symlink_to(other / "secret")
    for path in (data / "out.jsonl", data / "folder" / "secret", data / "chain" / "secret", data / "folder" / "none"):
        assert "leads through a link out" in why_not(roots, path)
    assert "has a link that leads out" in why_not(roots, data / "model", whole=True)
    assert str(other) not in why_not(roots, data / "out.jsonl"), "the target is not revealed"


def test_a_root_may_be_a_link_and_is_known_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    roots = FileRoots((str(tmp_path / "link"),), "V")
    assert why_not(roots, tmp_path / "link" / "x") == why_not(roots, tmp_path / "real" / "x") == ""


def test_by_default_the_operating_system_s_directories_are_not_roots() -> None:
    roots = FileRoots(default_weight_roots(), "HEADRACE_WEIGHT_ROOTS")
    for path in (
        "/etc/cron.d",
        "/etc/shadow",
        "/proc/1/environ",
        "/run/secrets/x",
        "/var/spool/cron",
        "/usr/lib",
        "/dev/shm",
    ):
        assert why_not(roots, path), path
    for path in (f"{Path.cwd()}/x", f"{Path.home()}/x", "/tmp/x", "s3://any/where"):
        assert why_not(roots, path) == ""
    assert "/" not in default_roots()


def test_roots_are_separated_like_path_and_urls_keep_their_colon() -> None:
    assert parse_roots("/data:/models/:s3://bucket/w:/x") == ("/data", "/models", "s3://bucket/w", "/x")
    assert parse_roots("") == ()
    with pytest.raises(UserError, match=r"X of this service names /a, /b$"):
        FileRoots(("/a", "/b", "/a"), "X").require("/c/d", field="model")
    with pytest.raises(ValueError, match="'data' is neither an absolute path nor a URL"):
        parse_roots("/x:data")


def test_every_path_of_a_run_is_looked_at(roots: FileRoots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    common = {"reward_funcs": ["accuracy_reward"], "eval_on_start": True}
    outside = {
        "model": "/etc", "datasets": [{"path": "/etc/a.jsonl"}, {"path": "json"}, {"path": "org/here"}],
        "eval_dataset_name": "/etc", "weight_transport": "disk", "weight_dir": "/etc/cron.d",
        "vllm": {"speculative_config": {"method": "draft_model", "model": "/etc/draft"}},
    }  # fmt: skip
    found = misplaced(RunConfig.model_validate(common | outside), data=roots, weights=roots)
    names = ["model", "datasets.0", "datasets.1", "datasets.2", "eval_dataset_name", "vllm", "weight_dir"]
    assert [field for field, _ in found] == names
    data = tmp_path / "data"
    inside = {
        "model": str(data / "model"), "dataset_name": str(data / "rows.jsonl"), "eval_dataset_name": "org/on-the-hub",
        "weight_transport": "disk", "weight_dir": "s3://bucket/weights/a",
    }  # fmt: skip
    assert misplaced(RunConfig.model_validate(common | inside), data=roots, weights=roots) == []


def test_a_tree_of_links_in_a_circle_ends(roots: FileRoots, tmp_path: Path) -> None:
    os.symlink(tmp_path / "data", tmp_path / "data" / "model" / "up")
    assert why_not(roots, tmp_path / "data" / "model", whole=True) == ""


def test_a_link_behind_a_link_leads_out_as_well(roots: FileRoots, tmp_path: Path) -> None:
    (tmp_path / "data" / "shared").mkdir()
    (tmp_path / "data" / "shared" / "tokenizer.json").symlink_to(tmp_path / "other" / "secret")
    (tmp_path / "data" / "model" / "parts").symlink_to(tmp_path / "data" / "shared")
    told = why_not(roots, tmp_path / "data" / "model", whole=True)
    assert "has a link that leads out" in told
    assert f"'{tmp_path}/data/shared/tokenizer.json'" in told, "the message names the link, not its target"
    assert "secret" not in told


def test_a_directory_with_more_than_can_be_looked_at_is_refused(
    roots: FileRoots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.files.file_roots._MAX_ENTRIES", 3)
    for name in range(3):
        (tmp_path / "data" / "model" / f"part-{name}").touch()
    assert why_not(roots, tmp_path / "data" / "model", whole=True)


def test_without_a_setting_no_directory_of_the_machine_is_listed() -> None:
    settings = ServiceSettings(redis_url=SecretStr("redis://127.0.0.1:6379/0"))
    for places in (settings.places_of_data(), settings.places_of_weights()):
        said = why_not(places, "/etc/shadow")
        assert "of this service is empty" in said
        assert not [root for root in places.roots if root in said]


def test_weights_are_not_written_among_the_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "of-another").mkdir(parents=True)
    (tmp_path / "link").symlink_to(runs)
    (tmp_path / "inner").symlink_to(runs / "of-another")
    for named in ("", str(tmp_path)):
        settings = TrainerSettings(runs_dir=runs, weight_roots=named)
        places = settings.places_of_weights()
        for path in (
            runs,
            runs / "of-another",
            runs / "of-another" / "checkpoints",
            tmp_path / "link",
            tmp_path / "inner",
        ):
            assert why_not(places, path), path
        assert why_not(places, tmp_path / "weights") == ""
        assert why_not(places, tmp_path / "runs-too") == ""
        assert why_not(settings.places_of_data(), runs / "of-another") == ""


async def test_the_check_of_engine_options_reads_no_model_outside_of_the_roots(
    roots: FileRoots, tmp_path: Path
) -> None:
    asked = {"model": str(tmp_path / "other"), "dataset_name": "org/rows", "reward_funcs": ["accuracy_reward"]}
    checker = EngineChecker({}, timeout_s=0.001, data=roots, weights=roots)  # no time to ask vLLM
    verdict = await checker.check(RunConfig.model_validate(asked).model_dump(mode="json"))
    assert [problem.field for problem in verdict.errors] == ["model"]


async def test_weights_are_not_read_from_outside_of_the_roots(roots: FileRoots) -> None:
    receiver = WeightReceiver(replica_id="generator-0", weight_roots=roots)
    engine = SimulatedEngine(SimulationSettings(), ModelFacts(100, None, None), index=0, max_model_len=None)
    receiver.attach(SimulatedReceivingEngine(engine, SimulationSettings()), run_id="r", model="m", dtype="float32")
    body = JoinRequest(
        run_id="r", epoch=1, transport="disk", weight_dir="/etc/r", master_address="127.0.0.1", master_port=1,
        rank_offset=1, world_size=2, torch_version="", nccl_version=None, buffer_bytes=1000, timeout_s=5.0,
    )  # fmt: skip
    with pytest.raises(PushError, match="not in a place that runs may name"):
        await receiver.join(body)
    receiver.detach()
    engine.close()


def test_a_pipe_below_a_root_is_refused_and_not_waited_for(roots: FileRoots, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data" / "pipe")
    with pytest.raises(UserError, match="pipe is not a file"):
        roots.open(str(tmp_path / "data" / "pipe"), field="f")
    with roots.open(str(tmp_path / "data" / "rows.jsonl"), field="f") as file:
        assert file.read() == b"{}"
