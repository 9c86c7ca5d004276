"""Token streams on the device and the clock of a training run."""

from __future__ import annotations

import lzma
import time
from pathlib import Path

import numpy as np
import torch
from tokenizer import BASE
from torch import Tensor

EOS = BASE + 1


class Stream:
    """A uint16 token stream with its document starts."""

    def __init__(self, path: Path, device: str) -> None:
        with lzma.open(path) as source:
            ids = np.frombuffer(source.read(), dtype=np.uint16)
        self.ids = torch.from_numpy(ids.astype(np.int32)).to(device)
        self.starts = torch.cat((self.ids.new_zeros(1), (self.ids[:-1] == EOS).nonzero()[:, 0] + 1))

    def sample(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """[batch, length] int64 windows; every second one begins at a document start, the others anywhere."""
        device, last = self.ids.device, len(self.ids) - length
        anywhere = torch.randint(last, (batch,), device=device, generator=generator)
        picks = torch.randint(len(self.starts), (batch,), device=device, generator=generator)
        begin = torch.where(torch.arange(batch, device=device) % 2 == 0, self.starts[picks].clamp(max=last), anywhere)
        return self.ids[begin[:, None] + torch.arange(length, device=device)].long()


class Clock:
    """Progress 0..1 of a run that is bounded by a number of steps or by seconds."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        if (steps is None) == (seconds is None):
            raise SystemExit("give either --steps or --seconds")
        self.steps, self.seconds, self.begin = steps, seconds, time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def progress(self, step: int) -> float:
        """Share of the budget that is used before `step`."""
        return step / self.steps if self.steps else self.elapsed() / (self.seconds or 1.0)
