"""An engine process without a model: the real decoder, process and ranks over the toy of tests/runtime.

`Open.artifact` is JSON: tp, slow (seconds a step), load (seconds), fail (a sentence: the engine cannot be opened).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from engine_runtime.decoder import Decoder, Event
from engine_runtime.engine import EngineError
from engine_runtime.executor.gloo import GlooCommunicator
from engine_runtime.generation import GenerationRequest
from engine_runtime.prefix_cache import PrefixMatch
from engine_runtime.ranks import RankGroup, Rendezvous
from engine_runtime.server.engine_process import Progress, connect, receive_open, serve
from tests.runtime.toy import ToyExecutor, toy_limits

FAULTY_SEED = 666  # a request with it makes the next step fail


class ToyRank:
    """One rank; the ranks meet in every step."""

    def __init__(self, at: Rendezvous, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.rank, self.slow = at.rank, options.get("slow", 0.0)
        self.comm = GlooCommunicator(at) if at.world > 1 else None
        limits = {key: value for key, value in options.items() if key in ("max_requests", "max_context", "kv_pages")}
        self.decoder = Decoder(ToyExecutor(toy_limits(**limits)))

    def submit(self, request: GenerationRequest) -> int:
        return self.decoder.submit(request)

    def cancel(self, request: int) -> None:
        self.decoder.cancel(request)

    def step(self) -> list[Event]:
        time.sleep(self.slow)
        if self.comm is not None:
            self.comm.all_gather(torch.zeros(1))
        return self.decoder.step()


class ToyRuntime:
    """`engine_process.StepLoop` over `ToyRank`s."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._group = RankGroup(options.get("tp", 1), ToyRank, (options,), timeout=60)
        self._faulty = False

    def submit(self, request: GenerationRequest) -> int:
        self._faulty = self._faulty or request.params.seed == FAULTY_SEED
        return self._group.call_checked("submit", request)

    def cancel(self, request: int) -> None:
        self._group.call_checked("cancel", request)

    def step(self) -> list[Event]:
        return self._group.call("step") if not self._faulty else [1 // 0]

    def match(self, prompt: Any) -> PrefixMatch:
        return self._decoder.match(prompt)

    def status(self) -> Any:
        return self._decoder.status()

    @property
    def busy(self) -> bool:
        return self._decoder.busy

    @property
    def stats(self) -> Any:
        return self._decoder.stats

    @property
    def _decoder(self) -> Decoder:
        return self._group.target.decoder

    def close(self) -> None:
        self._group.close()


def open_toy(options: dict[str, Any], progress: Progress) -> ToyRuntime:
    if "fail" in options:
        raise EngineError(options["fail"])
    if "crash" in options and not os.path.exists(options["crash"]):  # the first time only
        open(options["crash"], "w").close()
        os._exit(3)
    progress(0.5, "reading")
    time.sleep(options.get("load", 0.0))
    return ToyRuntime(options)


if __name__ == "__main__":
    channel = connect(int(sys.argv[1]))
    message = receive_open(channel)
    sys.exit(serve(channel, lambda progress: open_toy(json.loads(message.artifact), progress)))
