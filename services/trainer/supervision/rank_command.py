"""Decides how many training ranks a run gets on this machine, and builds their command. Never imports torch.

one rank           python -m services.trainer.rank RUN_ID
several            python -m services.trainer.supervision.rank_launcher --nproc-per-node N ... RUN_ID -- the above
"""

import sys
from collections.abc import Mapping

from services.trainer.settings import TrainerSettings
from shared.errors import UserError
from shared.gpus import num_gpus
from shared.run_options.optimizers import FACTS
from shared.run_options.run_config import RunConfig


def rank_command(run_id: str, config: RunConfig, settings: TrainerSettings) -> list[str]:
    """Return the command that starts the run's training ranks on this machine, the first of the run's machines.

    Raises:
        UserError: The run needs several machines, and the rendezvous endpoint is missing or invalid.
    """
    num_ranks = ranks_per_node(config, settings.rank_environment())
    if num_ranks == 1 and config.nnodes == 1:
        return [*settings.rank_command, run_id]
    command = [sys.executable, "-m", "services.trainer.supervision.rank_launcher", "--nproc-per-node", str(num_ranks)]
    if config.nnodes > 1:
        if not settings.rendezvous_endpoint:
            raise UserError(
                f"nnodes={config.nnodes}, but HEADRACE_RENDEZVOUS_ENDPOINT is not set: set it to the HOST:PORT of this "
                "machine at which the training ranks of the other machines reach this one's",
                field="nnodes",
            )
        try:
            split_endpoint(settings.rendezvous_endpoint)
        except ValueError as error:
            raise UserError(f"HEADRACE_RENDEZVOUS_ENDPOINT: {error}", field="nnodes") from error
        command += ["--nnodes", str(config.nnodes), "--endpoint", settings.rendezvous_endpoint]
    return [*command, run_id, "--", *settings.rank_command]


def ranks_per_node(config: RunConfig, environment: Mapping[str, str]) -> int:
    """Return the number of training ranks per machine: the run's setting, or with ``auto`` one per GPU.

    With ``auto`` it is 1 without a GPU, with ``load_in_4bit``, and with an optimizer that cannot be sharded.
    """
    if config.nproc_per_node != "auto":
        return config.nproc_per_node
    if config.load_in_4bit:
        return 1  # a base in 4 bits is not sharded
    if FACTS[config.optim].why_one_rank:
        return 1
    return max(1, num_gpus(environment))


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT.

    Raises:
        ValueError: The text has neither form.
    """
    host, _, port = endpoint.rpartition(":")
    if not host:
        raise ValueError(f"{endpoint!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
