"""An HTTP client of the run API: the public Python interface of a running headrace.

    with HeadraceClient("http://127.0.0.1:8400", api_key) as client:
        submission = client.submit({"model": ..., "dataset_name": ..., "reward_funcs": [...]})
        for event in client.events(submission.run_id):
            print(event.kind, event.data)

Runs are plain dictionaries, as the API sends them. Lists of rows can also be returned as data frames:
``client.metrics(run_id, dataframe="pandas")``, or ``"polars"``. In place of a run's id, every method takes its name or
the beginning of its id. If several runs fit, the error has status 409, and its ``problem`` lists them as
``candidates``. Every failed request raises HeadraceApiError with a readable message. Every request has a timeout. The
proxy variables of the environment are ignored.
"""

import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload
from urllib.parse import quote

from headrace import file_transfer
from headrace.api_connection import ApiConnection
from headrace.api_connection import HeadraceApiError as HeadraceApiError
from headrace.data_frames import DataFrames, frame_of
from headrace.event_stream import Event as Event
from headrace.file_transfer import OnProgress

Run = dict[str, Any]
Rows = list[dict[str, Any]]
ENDED = frozenset({"finished", "stopped", "failed"})
"""Statuses from which a run never returns."""
NOT_ENDED = ("queued", "running", "paused")
Sort = Literal["created", "started", "ended", "name", "status", "step"]

_MAX_MODULE_NAME = 64
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.2, 3.0
_IN_FLIGHT = "/problems/request-in-flight"
_A_PROXY_GAVE_UP = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
"""Statuses with which a proxy, an Ingress for example, answers while the API may still create the run."""
_ASK_AGAIN_S = 2.0
"""Time between two repetitions of a submit whose answer is still missing."""


@dataclass(frozen=True)
class Submission:
    """The API's answer to a submit.

    Args:
        run: The run; None if the config was only checked.
        warnings: Notes on settings that may surprise. They do not keep the run from starting.
        derived: Quantities that follow from settings and data, such as ``steps``, ``prompt_groups`` and ``columns``.
    """

    run: Run | None
    warnings: tuple[str, ...]
    derived: dict[str, Any]

    @property
    def run_id(self) -> str:
        """The id of the submitted run. Raises HeadraceApiError if the config was only checked."""
        if self.run is None:
            raise HeadraceApiError("the run was only checked, not submitted")
        return str(self.run["run_id"])


class HeadraceClient:
    """A client of one run API: submits, follows, edits and stops runs, and transfers files.

    Args:
        base_url: The run API's URL, such as ``http://127.0.0.1:8400``.
        key: The API key; ``headrace up`` prints where it is kept.
        timeout_s: Longest wait for an answer, except to submits, checks and file transfers.
        submit_timeout_s: Longest wait for the answer to a submit or a check, for which the API reads model and dataset;
            ``timeout_s`` if left out.
        ca_file: PEM file with the CAs to trust, for an ``https://`` API whose certificate is not from a public CA.

    Raises:
        UserError: ``ca_file`` holds no certificates, ``key`` is not printable ASCII, or ``base_url`` is invalid.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        timeout_s: float = 120.0,
        submit_timeout_s: float | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._submit_timeout_s = timeout_s if submit_timeout_s is None else submit_timeout_s
        self._ca_file = ca_file
        self._api = ApiConnection(self.base_url, key, timeout_s=timeout_s, ca_file=ca_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def another(self) -> "HeadraceClient":
        """Return a client of the same API that has its own connections, for use in another thread."""
        return HeadraceClient(
            self.base_url,
            self._key,
            timeout_s=self._timeout_s,
            submit_timeout_s=self._submit_timeout_s,
            ca_file=self._ca_file,
        )

    def close(self) -> None:
        """Close all HTTP connections. No request can be sent afterwards."""
        self._api.close()

    def submit(self, config: Mapping[str, Any]) -> Submission:
        """Submit a run. A request without an answer is repeated with the same Idempotency-Key, to make only one run.

        While the API still handles the first request, or after a proxy gave up waiting for it, the request is repeated
        for at most ``submit_timeout_s``.

        Raises:
            HeadraceApiError: The config was refused (the message says why), or the API cannot be reached.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        deadline: float | None = None
        while True:
            try:
                return _submission(self._offer(config, headers=headers, num_tries=3))
            except HeadraceApiError as error:
                deadline = deadline or time.monotonic() + self._submit_timeout_s
                if not _may_be_answered_later(error) or time.monotonic() >= deadline:
                    raise
            time.sleep(_ASK_AGAIN_S)

    def check(self, config: Mapping[str, Any]) -> Submission:
        """Check a run config with its dataset, model and rewards, and return a Submission without a run."""
        return _submission(self._offer(config, params={"dry_run": "true"}))

    def wait_until_heard(self) -> None:
        """Wait for any answer of the API, to notice that it is down before a submit, whose timeout is much longer.

        Raises:
            HeadraceApiError: The API does not answer.
        """
        self._api.wait_until_heard()

    def list(
        self,
        *,
        status: Collection[str] = (),
        name: str | None = None,
        tags: Collection[str] = (),
        sort: Sort | None = None,
    ) -> list[Run]:
        """Return the runs with any of ``status``, this ``name`` and all of ``tags``, newest first or by ``sort``."""
        return [*self.each_run(status=status, name=name, tags=tags, sort=sort)]

    def each_run(
        self,
        *,
        status: Collection[str] = (),
        name: str | None = None,
        tags: Collection[str] = (),
        sort: Sort | None = None,
    ) -> Iterator[Run]:
        """Yield the same runs as ``list``, fetching each page when it is needed."""
        wanted: dict[str, Any] = {"status": [*status], "name": name, "tag": [*tags], "sort": sort}
        return self._api.pages(
            "/v1/runs", "runs", **{key: value for key, value in wanted.items() if value not in (None, [])}
        )

    def get(self, run_id: str) -> Run:
        """Return one run: its config, status, reason and progress, and what it is ``waiting_for``."""
        return self._api.request("GET", f"/v1/runs/{_quoted(run_id)}")

    def edit(self, run_id: str, changes: Mapping[str, Any]) -> Run:
        """Change ``name``, ``tags``, ``metadata`` or ``max_steps`` of a run, and return the run.

        ``tags`` replaces all tags. ``metadata`` sets only the given entries, and removes those with the value None.
        """
        return self._api.request("PATCH", f"/v1/runs/{_quoted(run_id)}", json=dict(changes))

    def stop(self, run_id: str) -> Run:
        """Ask a run to stop after its current batch, with a checkpoint and a model. Asking twice is harmless."""
        return self._api.request("POST", f"/v1/runs/{_quoted(run_id)}/stop")

    def pause(self, run_id: str) -> Run:
        """Ask a run to pause after its current batch. Asking twice is harmless."""
        return self._api.request("POST", f"/v1/runs/{_quoted(run_id)}/pause")

    def resume(self, run_id: str) -> Run:
        """Ask a paused run to go on, or a failed one to continue from its checkpoint. Asking twice is harmless."""
        return self._api.request("POST", f"/v1/runs/{_quoted(run_id)}/resume")

    @overload
    def metrics(self, run_id: str, *, dataframe: None = None) -> Rows: ...
    @overload
    def metrics(self, run_id: str, *, dataframe: DataFrames) -> Any: ...
    def metrics(self, run_id: str, *, dataframe: DataFrames | None = None) -> Any:
        """Return the metrics of every optimizer step so far, oldest first: dictionaries, or a data frame."""
        return self._rows(run_id, "metrics", dataframe)

    @overload
    def evaluations(self, run_id: str, *, dataframe: None = None) -> Rows: ...
    @overload
    def evaluations(self, run_id: str, *, dataframe: DataFrames) -> Any: ...
    def evaluations(self, run_id: str, *, dataframe: DataFrames | None = None) -> Any:
        """Return the metrics (``eval_...``) of every evaluation so far, oldest first: dictionaries, or a data frame."""
        return self._rows(run_id, "evaluations", dataframe)

    @overload
    def rollouts(self, run_id: str, *, step: int | None = None, dataframe: None = None) -> Rows: ...
    @overload
    def rollouts(self, run_id: str, *, step: int | None = None, dataframe: DataFrames) -> Any: ...
    def rollouts(self, run_id: str, *, step: int | None = None, dataframe: DataFrames | None = None) -> Any:
        """Return the rollouts of ``step``, by default the newest that was logged: dictionaries, or a data frame."""
        return self._rows(run_id, "rollouts", dataframe, **({} if step is None else {"step": step}))

    def event_frame(self, run_id: str, *, dataframe: DataFrames = "pandas", patience_s: float = 60.0) -> Any:
        """Wait until a run has ended, and return its events as a data frame with the columns id, kind and data.

        ``patience_s`` is the longest time in seconds for which the API may be unreachable.
        """
        found = self.events(run_id, patience_s=patience_s)
        return frame_of([{"id": event.id, "kind": event.kind, "data": event.data} for event in found], dataframe)

    def events(
        self,
        run_id: str,
        *,
        last_event_id: str | None = None,
        patience_s: float = 60.0,
        stop: threading.Event | None = None,
    ) -> Iterator[Event]:
        """Yield events until the run has ended. A broken stream is reconnected without losing events.

        Args:
            run_id: The run's id.
            last_event_id: Continue after this event; by default, begin with the oldest event that is kept.
            patience_s: How long the API may be unreachable before the error is raised, from the first failure on.
            stop: Another thread sets it to end the stream, which happens at the next event or reconnect.

        Raises:
            HeadraceApiError: The API refused the request, or was unreachable for more than ``patience_s``.
        """
        stop = stop or threading.Event()
        backoff_s, failing_since = _FIRST_BACKOFF_S, None

        def is_heard() -> None:
            nonlocal failing_since
            failing_since = None

        while not stop.is_set():
            try:
                run_id = str(self.get(run_id)["run_id"])  # from now on a name means this run
                where = f"/v1/runs/{_quoted(run_id)}/events"
                for event in self._api.events(where, last_event_id, on_open=is_heard):
                    last_event_id = event.id or last_event_id
                    backoff_s = _FIRST_BACKOFF_S
                    yield event
                    if stop.is_set() or (event.kind == "status" and event.data.get("final")):
                        return
                if self.get(run_id)["status"] in ENDED:
                    return
            except HeadraceApiError as error:
                failing_since = time.monotonic() if failing_since is None else failing_since
                if not error.may_pass or time.monotonic() - failing_since > patience_s:
                    raise
            stop.wait(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def upload(self, path: str | Path, *, on_progress: OnProgress | None = None) -> str:
        """Upload a file or directory, and return the path to use for it in a run's config.

        Files that the services already have are not sent again. An interrupted upload continues where it stopped.

        Args:
            path: A data set's file, or the directory of a data set or model. Files whose names begin with a dot are
                left out.
            on_progress: Called with the number of bytes that have arrived, and the total.

        Raises:
            UserError: There is nothing to upload, or a file changed in the meantime.
            HeadraceApiError: The API refused the upload, or was unreachable for a minute.
        """
        return file_transfer.upload(self._api, Path(path), on_progress=on_progress)

    def upload_module(self, name: str, source: str) -> str:
        """Upload a Python module with functions for runs, and return the name by which the services import it.

        This name has digits of the source's hash at its end. The deployment must accept code from clients, and the key
        needs the scope ``code``.

        Args:
            name: Beginning of the module's name. Characters other than letters, digits and underscores become
                underscores.
            source: The module's text. It can import packages installed for the services, and the operator's modules.

        Raises:
            HeadraceApiError: The API refused the module, or cannot be reached.
        """
        fitting = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII)[:_MAX_MODULE_NAME]
        return str(self._api.request("POST", "/v1/modules", json={"name": fitting, "source": source})["module"])

    def download_model(self, run_id: str, directory: str | Path, *, on_progress: OnProgress | None = None) -> Path:
        """Download the final model of a run into a directory, and return the directory.

        Files that already have the right content are not downloaded again. A file gets its name once it is complete.

        Args:
            run_id: The run's id.
            directory: Where the files are written; it is created if need be.
            on_progress: Called with the number of bytes that have arrived, and the total.

        Raises:
            HeadraceApiError: The run has left no model, or the API was unreachable for a minute.
        """
        where = f"/v1/runs/{_quoted(run_id)}/model"
        return file_transfer.download(self._api, where, Path(directory), on_progress=on_progress)

    def _rows(self, run_id: str, what: str, dataframe: DataFrames | None, **params: Any) -> Any:
        rows = [*self._api.pages(f"/v1/runs/{_quoted(run_id)}/{what}", what, **params)]
        return rows if dataframe is None else frame_of(rows, dataframe)

    def _offer(self, config: Mapping[str, Any], *, num_tries: int = 1, **request: Any) -> dict[str, Any]:
        """Send a run config to ``POST /v1/runs`` with the timeout of submits, and return the answer."""
        limit_s = self._submit_timeout_s
        return self._api.request(
            "POST", "/v1/runs", num_tries=num_tries, timeout_s=limit_s, json=dict(config), **request
        )


def _submission(body: Mapping[str, Any]) -> Submission:
    return Submission(run=body.get("run"), warnings=tuple(body.get("warnings", ())), derived=body.get("derived", {}))


def _may_be_answered_later(error: HeadraceApiError) -> bool:
    kind = error.problem.get("type")
    return kind == _IN_FLIGHT or (kind is None and error.status in _A_PROXY_GAVE_UP)


def _quoted(run_id: str) -> str:
    return quote(run_id, safe="")
