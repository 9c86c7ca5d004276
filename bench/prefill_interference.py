"""What a long prompt does to a running stream: its speed beside the prefill against its speed alone.

    python bench/prefill_interference.py [ARTIFACT] [--prompts 2] [--prompt-tokens 1800] [--repeats 5] [--output FILE]

A stream decodes; after some tokens, prompts arrive that generate one token each. The same text is generated once
without them, and the time of the very same tokens is compared, so that acceptance plays no part. ratio: solo seconds
over seconds beside the prefill. gap: longest time between two outputs of the stream. Repeats take turns (beside,
alone, beside, ..) and the one with the median ratio is reported, as other load comes and goes; --clock cpu counts this
process's processor time instead of the wall's, for a machine that does other things (one rank only).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from engine_runtime.bench import DEFAULT_PROMPTS, commit, read_prompts  # noqa: E402
from engine_runtime.budget import PLAIN, Speculation  # noqa: E402
from engine_runtime.doctor import cpu_model  # noqa: E402
from engine_runtime.generation import GenerationRequest  # noqa: E402
from engine_runtime.runtime import Runtime  # noqa: E402
from engine_runtime.sampling import SamplingParams  # noqa: E402
from engine_runtime.tokenizer import Tokenizer  # noqa: E402

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WARM = 16  # tokens of the stream before the prompts arrive


@dataclass(frozen=True)
class Interference:
    """tokens: of the stream while prompts were prefilled; the speeds are theirs, in tokens a second."""

    tokens: int
    solo_tokens_per_second: float
    beside_tokens_per_second: float
    solo_longest_gap: float
    beside_longest_gap: float
    prefill_tokens_per_second_alone: float
    prefill_tokens_per_second_beside: float

    @property
    def ratio(self) -> float:
        return self.beside_tokens_per_second / self.solo_tokens_per_second


def measure(
    runtime: Runtime,
    stream: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    clock: Callable[[], float] = time.perf_counter,
) -> Interference:
    """Run `prompts` alone, `stream` beside them, and the same part of `stream` alone. The stream must outlast the
    prompts, else ValueError."""
    others = [GenerationRequest(prompt, SamplingParams(max_tokens=1), PLAIN) for prompt in prompts]
    total = sum(len(prompt) for prompt in prompts)

    def stream_until(tokens: int, beside: Sequence[GenerationRequest]) -> tuple[list[float], float, float]:
        """Run the stream to `tokens` tokens, then on until `beside`, submitted there, are done. Gives when each of its
        tokens came, when `beside` arrived and when they were done."""
        runtime.clear_cache()
        times: list[float] = []
        running = runtime.submit(stream)
        waiting: set[int] = set()
        arrived = done = 0.0
        while len(times) < tokens or waiting:
            for event in runtime.step():
                if event.request == running:
                    times += [clock()] * len(event.output.tokens)
                    if event.output.finish is not None:
                        raise ValueError(f"the stream ended after {len(times)} tokens, before the prompts did")
                elif event.output.finish is not None:
                    waiting.discard(event.request)
                    done = clock()
            if not arrived and len(times) >= tokens:
                arrived = clock()
                waiting = {runtime.submit(request) for request in beside}
        runtime.cancel(running)
        return times, arrived, done

    runtime.generate(others)  # the scheduler learns what a chunk takes, the machine warms up
    runtime.clear_cache()
    start = clock()
    runtime.generate(others)
    alone = clock() - start
    beside, arrived, done = stream_until(WARM, others)
    first = sum(moment <= arrived for moment in beside) - 1
    last = len(beside) - 1
    solo, _, _ = stream_until(last + 1, [])
    return Interference(
        tokens=last - first,
        solo_tokens_per_second=(last - first) / (solo[last] - solo[first]),
        beside_tokens_per_second=(last - first) / (beside[last] - beside[first]),
        solo_longest_gap=_gap(solo[first : last + 1]),
        beside_longest_gap=_gap(beside[first : last + 1]),
        prefill_tokens_per_second_alone=total / alone,
        prefill_tokens_per_second_beside=total / (done - arrived),
    )


def _gap(times: list[float]) -> float:
    return max(after - before for before, after in zip(times, times[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", default=str(ROOT / "artifacts" / "k2-nano-cpu"))
    parser.add_argument("--prompts", type=int, default=2, help="that arrive while the stream runs")
    parser.add_argument("--prompt-tokens", type=int, default=1800, help="of each")
    parser.add_argument("--max-tokens", type=int, default=2000, help="of the stream")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write the result there as JSON")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.artifact)
    held_out = read_prompts(DEFAULT_PROMPTS, 200, tokenizer, options.artifact)
    words = [token for prompt in held_out[1:] for token in prompt.tokens]
    size = options.prompt_tokens
    prompts = [tuple(words[i * size : (i + 1) * size]) for i in range(options.prompts)]
    if len(prompts[-1]) < size:
        raise SystemExit(f"--prompts x --prompt-tokens: the held-out prompts hold {len(words)} tokens only")
    params = SamplingParams(max_tokens=options.max_tokens, stop_ids=())
    results: dict[str, Any] = {}
    with Runtime.open(options.artifact, threads=options.threads) as runtime:
        for speculation in (PLAIN, Speculation("tree", 8)):
            stream = GenerationRequest(tuple(held_out[0].tokens), params, speculation)
            found = sorted(
                (measure(runtime, stream, prompts, CLOCKS[options.clock]) for _ in range(options.repeats)),
                key=lambda f: f.ratio,
            )
            median = found[len(found) // 2]
            values = {name: round(value, 4) for name, value in asdict(median).items()}
            results[speculation.mode] = {
                **values,
                "ratio": round(median.ratio, 3),
                "ratios": [round(f.ratio, 3) for f in found],
            }
    report = {
        "artifact": Path(options.artifact).name,
        "prompts": options.prompts,
        "prompt_tokens": size,
        "clock": options.clock,
        "results": results,
        "device": cpu_model(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load_average": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
