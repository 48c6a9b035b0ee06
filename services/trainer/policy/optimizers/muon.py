"""Muon (https://kellerjordan.github.io/posts/muon) for matrices, and AdamW for everything else, as one optimizer.

    matrices of the layers, adapters    --Muon-->   update: momentum, orthogonalised
    embeddings, last projection, norms  --AdamW-->  update: momentum / root of the mean square gradient

One learning rate and one schedule serve both: by default Muon's update has the size of AdamW's (arXiv 2502.16982).
"""

from collections.abc import Callable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Combines optimizers of different parameters into one, which has their parameter groups and one shared state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {"lr": optimizers[0].defaults["lr"]})  # some schedules of transformers read it
        for optimizer in optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with each optimizer. ``closure`` is ignored."""
        del closure
        for optimizer in self._optimizers:
            optimizer.step()
