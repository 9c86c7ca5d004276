"""Objects that `RankGroup` workers make, by name, in the tests of the ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from engine_runtime.executor.cpu import CpuExecutor
from engine_runtime.executor.gloo import GlooCommunicator
from engine_runtime.ranks import Rendezvous
from tests.runtime.plans import small_plan, small_weights


class Small:
    """The small plan on one rank."""

    def __init__(self, at: Rendezvous, tp: int) -> None:
        torch.set_num_threads(1)
        comm = GlooCommunicator(at) if at.world > 1 else None
        self.executor = CpuExecutor(small_plan(tp, at.rank), small_weights(tp, at.rank), comm)

    def run(self, tokens: list[int]) -> None:
        self.executor.write("tokens", tokens)
        self.executor.write("row_request", 0)
        self.executor.run("verify[4]")

    def read_buffer(self, name: str) -> np.ndarray:
        return self.executor.read(name).copy()


class Failing:
    """Fails in the way and place that `where` says."""

    def __init__(self, at: Rendezvous, where: str) -> None:
        self.rank, self.where = at.rank, where
        self.comm = GlooCommunicator(at) if at.world > 1 else None
        if where == "open" and at.rank == 1:
            raise RuntimeError("cannot open")
        if where == "import" and at.rank == 1:
            os._exit(7)

    def refuse(self) -> None:
        raise ValueError("refused")

    def count(self) -> int:
        return 1

    def work(self) -> Any:
        """Everybody meets in a collective, unless something happens first."""
        if self.rank == 1 and self.where == "raise":
            raise RuntimeError("out of luck")
        if self.rank == 1 and self.where == "die":
            os._exit(9)
        if self.rank == 1 and self.where == "hang":
            time.sleep(60)
        if self.rank == 0 and self.where == "parent":
            raise RuntimeError("rank zero gives up")
        if self.rank == 0 and self.where == "interrupt":
            raise KeyboardInterrupt
        assert self.comm is not None
        return torch.cat(self.comm.all_gather(torch.tensor([float(self.rank)]))).tolist()
