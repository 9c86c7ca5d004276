"""The transport between CPU ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine_runtime.ranks import Rendezvous


class GlooCommunicator:
    """`plugins.core.plugin.Communicator` over a gloo group of its own, met through the file `store`.

    torch's default group is left alone: it numbers groups by process, which a failed start puts out of step.
    """

    def __init__(self, at: Rendezvous) -> None:
        self.rank = at.rank
        self.world = at.world
        limit = timedelta(seconds=at.timeout)
        store = dist.FileStore(at.store, at.world)
        store.set_timeout(limit)
        self._group: Any = dist.ProcessGroupGloo(store, at.rank, at.world, limit)  # its stubs lack the collectives

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(self.world)]
        self._group.allgather([parts], [value]).wait()
        return parts
