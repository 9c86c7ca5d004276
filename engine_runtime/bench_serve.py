"""`python -m engine_runtime bench serve URL`: what a server's clients see, with the server's own token counts.

Closed loop: as many clients as --concurrency, each sending its next request when the last one ended. Open loop
(--rate): requests arrive at random (Poisson) whatever the server does. The record holds all that a second run needs
(--replay) and the hash of every answer, so that two runs can be told to have done the same work.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from engine_runtime.bench import commit
from engine_runtime.bench_serve_client import Sample, measure
from engine_runtime.cli import CommandError
from engine_runtime.prompts import DEFAULT_PROMPTS, read_prompt_file

SCHEMA = 1
# of the command line, kept in the record and taken from it by --replay
SETTINGS = ("prompts", "requests", "repeat", "concurrency", "rate", "max_tokens", "temperature", "seed", "no_thinking")


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` as `engine_runtime.cli` parses them. Returns the exit code."""
    settings = _replayed(args.replay) if args.replay else {name: getattr(args, name) for name in SETTINGS}
    _check(settings)
    path = Path(settings["prompts"] or DEFAULT_PROMPTS)
    prompts = read_prompt_file(path, settings["requests"])
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    record = asyncio.run(_bench(args.url, headers, settings, prompts))
    record["prompts_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))
    return 1 if record["summary"]["errors"] else 0


def _replayed(file: str) -> dict[str, Any]:
    try:
        return {name: json.loads(Path(file).read_text(encoding="utf-8"))["settings"][name] for name in SETTINGS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"--replay {file}: not a record of this command: {error!r}") from None


def _check(settings: Mapping[str, Any]) -> None:
    for name in ("requests", "repeat", "concurrency", "max_tokens"):
        if settings[name] < 1:
            raise CommandError(f"--{name.replace('_', '-')}: expected at least 1, found {settings[name]}")
    if settings["rate"] is not None and not 0 < settings["rate"] < 1e4:
        raise CommandError(f"--rate: expected requests a second, found {settings['rate']}")


async def _bench(
    url: str, headers: Mapping[str, str], settings: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=None, limits=limits) as client:
        server = await _server(client)
        before = await _counters(client)
        begin = time.perf_counter()
        samples = await _run(client, settings, prompts, begin)
        seconds = time.perf_counter() - begin
        after = await _counters(client)
    return {
        "schema": SCHEMA,
        "url": url,
        "server": server,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "settings": dict(settings),
        "seconds": seconds,
        "summary": summarize(samples, seconds),
        "server_counters": {name: after[name] - before.get(name, 0.0) for name in after},
        "requests": [asdict(sample) for sample in samples],
    }


async def _server(client: httpx.AsyncClient) -> Any:
    try:
        reply = await client.get("/version")
        return reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError) as error:
        raise CommandError(f"{client.base_url}: no server answers there ({type(error).__name__})") from None


async def _counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's own counters of tokens, passes and acceptance; none where it has no /metrics of this kind."""
    reply = await client.get("/metrics")
    found: dict[str, float] = {}
    for line in reply.text.splitlines() if reply.status_code == 200 else ():
        name, _, value = line.rpartition(" ")
        if name.startswith("k2_") and "_total" in name and "bucket" not in name:
            found[name] = float(value)
    return found


async def _run(
    client: httpx.AsyncClient, settings: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]], begin: float
) -> list[Sample]:
    """Every prompt, `repeat` times in the same order: the second time its prefix can be cached."""
    work = [(repeat, prompt) for repeat in range(settings["repeat"]) for prompt in prompts]
    rng = random.Random(settings["seed"])
    options = {name: settings[name] for name in ("max_tokens", "temperature", "seed")}
    if settings["no_thinking"]:
        options["chat_template_kwargs"] = {"thinking": False}
    done = 0

    async def one(repeat: int, prompt: Mapping[str, Any]) -> Sample:
        nonlocal done
        sample = Sample(str(prompt.get("id")), prompt["kind"], repeat, time.perf_counter() - begin)
        await measure(client, prompt, options, sample)
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{len(work)} requests", end="", file=sys.stderr, flush=True)
        return sample

    if settings["rate"] is not None:
        tasks = []
        for entry in work:
            tasks.append(asyncio.create_task(one(*entry)))
            await asyncio.sleep(rng.expovariate(settings["rate"]))
        return list(await asyncio.gather(*tasks))
    waiting = iter(work)
    samples: list[Sample] = []

    async def client_loop() -> None:
        for entry in waiting:
            samples.append(await one(*entry))

    await asyncio.gather(*(client_loop() for _ in range(settings["concurrency"])))
    return samples


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Figures over the requests that ended without an error."""
    good = [sample for sample in samples if sample.error is None]
    passes = sum(sample.passes for sample in good)
    tokens = sum(sample.output_tokens for sample in good)
    gaps = [gap for sample in good for gap in sample.gaps]
    warm = [s for s in good if s.cached_tokens]
    cold = [s for s in good if not s.cached_tokens]
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": tokens,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(good) / seconds,
        "first_text_seconds": spread([s.first for s in good]),
        "first_text_seconds_cold": spread([s.first for s in cold]),
        "first_text_seconds_warm": spread([s.first for s in warm]),
        "seconds_per_token": spread([s.seconds_per_token for s in good]),
        "seconds_between_pieces": spread(gaps),
        "whole_seconds": spread([s.whole for s in good]),
        # the first token of an answer comes from its prefill
        "tokens_per_pass": (tokens - len(good)) / passes if passes else None,
        "accepted_per_pass": sum(sample.accepted for sample in good) / passes if passes else None,
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and percentiles; None for no values."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    at = {f"p{p}": known[min(len(known) - 1, int(p / 100 * len(known)))] for p in (50, 90, 99)}
    return {"mean": statistics.fmean(known), **at, "max": known[-1]}


def table(record: Mapping[str, Any]) -> str:
    """The summary for people."""
    summary = record["summary"]
    lines = [
        f"{summary['requests']} requests in {record['seconds']:.1f} s, {summary['errors']} errors",
        f"tokens: {summary['prompt_tokens']} in the prompts ({summary['cached_tokens']} cached), "
        f"{summary['output_tokens']} generated, {summary['output_tokens_per_second']:.1f} a second",
    ]
    if summary["tokens_per_pass"] is not None:
        lines.append(f"tokens a pass: {summary['tokens_per_pass']:.2f}")
    lines.append(f"{'milliseconds':<28}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}")
    for name, words in (
        ("first_text_seconds", "to the first text"),
        ("first_text_seconds_cold", "  nothing cached"),
        ("first_text_seconds_warm", "  prefix cached"),
        ("seconds_per_token", "a token after that"),
        ("seconds_between_pieces", "between pieces"),
        ("whole_seconds", "whole request"),
    ):
        found = summary[name]
        if found is not None:
            cells = "".join(f"{1000 * found[key]:9.1f}" for key in ("mean", "p50", "p90", "p99", "max"))
            lines.append(f"{words:<28}{cells}")
    first = next((r["error"] for r in record["requests"] if r["error"]), None)
    return "\n".join(lines + ([f"first error: {first}"] if first else []))
