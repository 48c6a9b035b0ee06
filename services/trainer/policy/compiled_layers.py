"""Compiles the decoder layers of a model with torch.compile.

    layer:  | norm, projections | packed attention | projection, norm, MLP |
              graph               not compiled       graph

Each layer is compiled by itself: the recomputation of activations and the gathering of sharded weights stay outside.
All layers share their graphs. Sizes are dynamic, because every pass has a different number of tokens.
The packed attention loops over rows of any lengths. It would be compiled again for each pass, so it is left out.
"""

import logging
from typing import Any, cast

import torch

from services.trainer.policy.sharding import decoder_layers
from services.trainer.policy.varlen_attention import register
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_GRAPHS_PER_LAYER = 64
"""torch gives up after 8: passes with and without gradient, with adapters off, and of several kinds of layers."""


def compile_layers(lm: Any, config: RunConfig, *, device: torch.device) -> None:
    """Have torch.compile compile each decoder layer in place, at its first pass. Parameter names do not change.

    Raises:
        UserError: The backend does not work here, or the model does not name its decoder layers.
    """
    options: dict[str, Any] = {"backend": config.compile_backend, "mode": config.torch_compile_mode}
    _try_backend(options, device)
    dynamo: Any = torch
    dynamo._dynamo.config.recompile_limit = _GRAPHS_PER_LAYER  # noqa: SLF001  torch's documented place for it
    register(compiles=True)
    for _, layer in decoder_layers(lm):
        cast(Any, layer).compile(**options, dynamic=True)
    log.info("the layers are compiled by %s at their first passes, which take longer", config.compile_backend)


def _try_backend(options: dict[str, Any], device: torch.device) -> None:
    """Compile a small function, so that a missing compiler is reported before training, as a UserError."""

    def line(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    try:
        compiled: Any = torch.compile(line, **options, dynamic=True)
        compiled(torch.ones(8, device=device))
    except (ImportError, OSError, RuntimeError, ValueError, TypeError) as error:  # torch's own are RuntimeErrors
        reason = next((text for text in str(error).splitlines() if text.strip()), type(error).__name__)
        raise UserError(
            f"torch.compile does not work here with the backend {options['backend']}: {reason}. Set "
            "torch_compile_backend: aot_eager, which needs no compiler, or leave torch_compile out",
            field="torch_compile_backend",
        ) from error
