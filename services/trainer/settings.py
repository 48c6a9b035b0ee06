"""Settings of the trainer service: of the run API, and of the training ranks, which inherit its environment."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from shared.files.file_roots import FileRoots
from shared.service.tls import PeerTls
from shared.settings import ServiceSettings, default_runs_dir

_REDIS_AT_SUBMIT_S = 60.0


class TrainerSettings(ServiceSettings):
    """The trainer's settings, from ``HEADRACE_*`` environment variables. Lists and tables are given as JSON."""

    runs_dir: Path = Field(default_factory=default_runs_dir, description="Checkpoints, logs and metrics of runs")
    rewarder_url: str = Field(default="http://127.0.0.1:8200", description="Rewarder that checks reward functions")
    sessions_url: str = Field(default="http://127.0.0.1:8300", description="Sessions service that checks tools")

    rank_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "services.trainer.rank"],
        min_length=1,
        description="Starts a training rank; the run id is appended",
    )
    rank_env: dict[str, str] = Field(default_factory=dict, description="Added to the environment of the rank")
    rank_cpus: list[int] | None = Field(default=None, min_length=1, description="CPUs the rank is pinned to")
    rank_stop_grace_s: float = Field(default=15.0, gt=0, description="Time from SIGTERM to SIGKILL of a rank")
    rank_exit_grace_s: float = Field(default=30.0, gt=0, description="How long a rank may outlive the end of its run")
    max_restarts_without_progress: int = Field(
        default=5, ge=0, description="Restarts without a new step; then the run fails"
    )
    first_backoff_s: float = Field(default=0.5, gt=0, description="Pause before the first restart of a rank; doubles")
    last_backoff_s: float = Field(default=10.0, gt=0, description="Longest pause before a restart")
    supervise_every_s: float = Field(default=1.0, gt=0, description="How often a run's record is checked")

    collective_timeout_s: float = Field(
        default=600.0, gt=0, description="Timeout of collective operations of several training ranks"
    )
    rendezvous_endpoint: str = Field(
        default="",
        description="HOST:PORT of this machine at which training ranks on other machines find its own; for nnodes > 1",
    )

    push_address: str = Field(
        default="127.0.0.1", description="Address of this host at which generators reach the communicator of the push"
    )

    tls_generator_name: str = Field(
        default="",
        description="Name that generators' certificates must be for; if empty, the host of each one's address",
    )

    dataset_check_timeout_s: float = Field(default=60.0, gt=0, description="Timeout for reading a dataset at submit")
    hub_timeout_s: float = Field(
        default=10.0, gt=0, description="Timeout for asking the Hugging Face hub about a model"
    )
    reward_check_timeout_s: float = Field(default=20.0, gt=0, description="Timeout of the rewarder's check at submit")
    tool_check_timeout_s: float = Field(
        default=20.0, gt=0, description="Timeout of the sessions service's check at submit"
    )
    engine_check_timeout_s: float = Field(
        default=75.0, gt=0, description="Timeout of a generator's check of vLLM's options at submit"
    )

    uploads_dir: Path | None = Field(
        default=None,
        description="Directory for files that clients upload, which generators and rewarders see too; off if empty",
    )
    max_upload_bytes: int = Field(default=200 * 1024**3, ge=1, description="Most bytes of the files of one upload")
    upload_expiry_s: float = Field(
        default=7 * 86400.0,
        ge=1,
        allow_inf_nan=False,
        description="Time without a use after which an upload is deleted",
    )
    uploads_keep_free_bytes: int = Field(
        default=2 * 1024**3, ge=0, description="Free space that uploads leave on their disk"
    )
    code_uploads_dir: Path | None = Field(
        default=None,
        description="Directory for code that clients upload, which the rewarder and the sessions service have on "
        "HEADRACE_REWARD_PATH and HEADRACE_TOOL_PATH; off if empty",
    )

    max_queued_runs: int = Field(default=1000, ge=1, description="Maximum number of queued runs")
    heartbeat_s: float = Field(default=15.0, gt=0, description="Longest time without data on an event stream")
    max_event_streams: int = Field(default=64, ge=1, description="Maximum number of open event streams")
    progress_is_stale_after_s: float = Field(
        default=30.0, gt=0, description="Time without progress after which a rank is reported as silent"
    )

    @model_validator(mode="after")
    def _paths_do_not_depend_on_the_working_directory(self) -> Self:
        if not self.runs_dir.is_absolute():
            raise ValueError(f"runs_dir={self.runs_dir} is relative; give an absolute path in HEADRACE_RUNS_DIR")
        return self

    @field_validator("uploads_dir", "code_uploads_dir", mode="before")
    @classmethod
    def _an_empty_directory_means_no_uploads(cls, given: object) -> object:
        return None if given == "" else given

    @model_validator(mode="after")
    def _runs_and_uploads_are_apart(self) -> Self:
        directories = {"HEADRACE_RUNS_DIR": self.runs_dir}
        for variable, given in (
            ("HEADRACE_UPLOADS_DIR", self.uploads_dir),
            ("HEADRACE_CODE_UPLOADS_DIR", self.code_uploads_dir),
        ):
            if given is None:
                continue
            if not given.is_absolute() or ".." in given.parts:
                raise ValueError(f"{variable}={given}: give an absolute path")
            here = given.resolve()
            for other, earlier in directories.items():
                there = earlier.resolve()
                if here.is_relative_to(there) or there.is_relative_to(here):
                    raise ValueError(
                        f"{variable}={given} and {other}={earlier} are inside each other; give two directories"
                    )
            directories[variable] = given
        return self

    @model_validator(mode="after")
    def _watchers_leave_room_for_other_requests(self) -> Self:
        if self.max_event_streams >= self.max_requests:
            raise ValueError(
                f"HEADRACE_MAX_EVENT_STREAMS={self.max_event_streams} leaves no requests for anything else, because "
                f"each stream is a request. Raise HEADRACE_MAX_REQUESTS={self.max_requests}"
            )
        return self

    @field_validator("rewarder_url", "sessions_url")
    @classmethod
    def _services_have_http_addresses(cls, url: str) -> str:
        if "@" in url:
            raise ValueError("the address of a service has no user and no password")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is not an http:// or https:// address")
        return url

    @model_validator(mode="after")
    def _pinned_cpus_exist(self) -> Self:
        missing = sorted(set(self.rank_cpus or ()) - os.sched_getaffinity(0))
        if missing:
            raise ValueError(
                f"rank_cpus names CPUs {missing}, which this process may not use; "
                f"it may use {sorted(os.sched_getaffinity(0))}"
            )
        return self

    def generator_tls(self) -> PeerTls:
        """Return the TLS settings for calls to generators."""
        return PeerTls(self.tls_ca_file, self.tls_generator_name)

    def places_of_data(self) -> FileRoots:
        """Return the places where models and data sets may be, including uploads and the output of earlier runs."""
        given = super().places_of_data()
        return replace(given, roots=(*given.roots, *self._own_directories()))

    def places_of_weights(self) -> FileRoots:
        """Return the places to which a run may write weights for its generators (``weight_dir``).

        The runs directory is excluded, because a run could overwrite another run's files there. The upload directories
        are excluded, because their files must never change.
        """
        code = [] if self.code_uploads_dir is None else [str(self.code_uploads_dir)]
        return replace(super().places_of_weights(), except_for=(*self._own_directories(), *code))

    def longest_submit_s(self) -> float:
        """Return the longest time that a submit may take, in seconds: the timeouts of its checks, and 60 s for Redis.

        The named paths and the checkpoint to begin from are checked first. All other checks then run at the same time.
        The Hugging Face hub may be asked three times.
        """
        others_s = (self.reward_check_timeout_s, self.tool_check_timeout_s, self.engine_check_timeout_s)
        checks_s = max(self.dataset_check_timeout_s, 3 * self.hub_timeout_s, *others_s)
        return self.hub_timeout_s + self.dataset_check_timeout_s + checks_s + _REDIS_AT_SUBMIT_S

    def _own_directories(self) -> tuple[str, ...]:
        return (str(self.runs_dir), *([] if self.uploads_dir is None else [str(self.uploads_dir)]))

    def rank_environment(self) -> dict[str, str]:
        """Return a training rank's environment: this process's, overridden by these settings, then by ``rank_env``."""
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as in generators: an index is the same GPU for both
            **os.environ,
            **self.secrets_of_a_child(),
            "HEADRACE_RUNS_DIR": str(self.runs_dir),
            "HEADRACE_UPLOADS_DIR": "" if self.uploads_dir is None else str(self.uploads_dir),
            "HEADRACE_CODE_UPLOADS_DIR": "" if self.code_uploads_dir is None else str(self.code_uploads_dir),
            "HEADRACE_REPLICA_ID": self.replica_id,
            "HEADRACE_PUSH_ADDRESS": self.push_address,
            "HEADRACE_TLS_CA_FILE": str(self.tls_ca_file.absolute()) if self.tls_ca_file is not None else "",
            "HEADRACE_TLS_GENERATOR_NAME": self.tls_generator_name,
            "HEADRACE_COLLECTIVE_TIMEOUT_S": str(self.collective_timeout_s),
            "HEADRACE_RANK_STOP_GRACE_S": str(self.rank_stop_grace_s),
            "HEADRACE_REDIS_PATIENCE_S": str(self.redis_patience_s),
            "HEADRACE_LOG_LEVEL": self.log_level,
            "HEADRACE_LOG_FORMAT": self.log_format,
            **self.rank_env,
        }
