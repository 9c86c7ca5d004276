"""`python -m engine_runtime bench`: plain, chain and tree decoding over the same prompts, greedy, one at a
time."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.cli import CommandError
from engine_runtime.doctor import cpu_model, usable_cores
from engine_runtime.measure import Measured, rate, run_request
from engine_runtime.profile import picture, report
from engine_runtime.prompts import DEFAULT_PROMPTS, read_prompt_file
from engine_runtime.sampling import SamplingParams
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import read_manifest

if TYPE_CHECKING:
    from engine_runtime.runtime import Runtime

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
AUTO = Speculation("tree", None)
HEADER = "mode   budget  tokens/s  tokens/pass  rows/pass  as plain"


@dataclass(frozen=True)
class Prompt:
    """One line of the prompt file, encoded."""

    id: str
    kind: str
    tokens: list[int]


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` as `engine_runtime.cli` parses them. Returns the exit code."""
    for option in ("requests", "max_tokens"):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise CommandError(f"--{name}: expected at least 1, found {getattr(args, option)}")
    modes = _modes(args.budgets)
    manifest = read_manifest(args.artifact)
    tokenizer = Tokenizer.load(args.artifact)
    prompts = read_prompts(Path(args.prompts or DEFAULT_PROMPTS), args.requests, tokenizer, args.artifact)
    if not manifest.limits.get("draft_depth"):
        modes = [PLAIN]
        print(f"{args.artifact} has no drafter: plain decoding only", file=sys.stderr)

    from engine_runtime.runtime import Runtime

    quiet = args.json == "-"
    with Runtime.open(args.artifact, threads=args.threads, tensorrt=args.tensorrt) as runtime:
        params = SamplingParams(max_tokens=args.max_tokens)
        _run_one(runtime, prompts[0], SamplingParams(max_tokens=2), PLAIN)  # warms up
        costs = runtime.measure_costs().to_json() if AUTO in modes else None
        results: list[dict[str, Any]] = []
        plain: list[Measured] = []
        if not quiet:
            print(HEADER)
        for speculation in modes:
            runs = [_run_one(runtime, prompt, params, speculation) for prompt in prompts]
            plain = plain or runs
            result = summarize(speculation, prompts, runs, plain)
            results.append(result)
            if not quiet:
                print(_line(result), flush=True)
        if args.profile is not None:
            _profile(runtime, args)
    result_file = {
        "schema": SCHEMA,
        "engine": {"path": args.artifact, "name": manifest.name, "arch": manifest.arch, "tp": manifest.tp},
        "checkpoint_fingerprint": manifest.checkpoint_fingerprint,
        "device": {"cpu": cpu_model(), "cores": usable_cores(), "threads": args.threads},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "requests": len(prompts),
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "step_costs": costs,
        "results": results,
    }
    if quiet:
        print(json.dumps(result_file, indent=1))
    elif args.json:
        _write("--json", args.json, json.dumps(result_file, indent=1) + "\n")
    return 0


def _profile(runtime: Runtime, args: argparse.Namespace) -> None:
    try:
        steps = runtime.profile(args.profile, args.context)
    except ValueError as error:
        raise CommandError(str(error)) from None
    print(f"\n{report(args.profile, args.context, steps)}", file=sys.stderr if args.json == "-" else sys.stdout)
    if args.picture is not None:
        _write("--picture", args.picture, picture(args.profile, args.context, steps))


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{option} {path}: cannot be written: {error.strerror}") from None


def _modes(budgets: str) -> list[Speculation]:
    """Plain first, then chain and tree at each budget; "auto" is a tree of the size that measured costs choose."""
    words = {word.strip() for word in budgets.split(",")}
    try:
        numbers = sorted(int(word) for word in words - {"auto"})
    except ValueError:
        raise CommandError(f"--budgets: expected numbers or auto, like 0,4,8,auto, found {budgets!r}") from None
    if numbers and numbers[0] < 0:
        raise CommandError(f"--budgets: expected numbers of at least 0, found {numbers[0]}")
    modes = [PLAIN, *(Speculation(mode, n) for mode in ("chain", "tree") for n in numbers if n)]
    return modes + [AUTO] * ("auto" in words)


def read_prompts(path: Path, count: int, tokenizer: Tokenizer, artifact: str) -> list[Prompt]:
    """The first `count` prompts of a file (see `engine_runtime.prompts`), encoded; messages go through the chat
    template of `artifact`."""
    template = None
    prompts: list[Prompt] = []
    for value in read_prompt_file(path, count):
        if "text" in value:
            tokens = tokenizer.encode(value["text"])
        else:
            from engine_runtime.chat import ChatTemplate

            template = template or ChatTemplate.load(artifact, tokenizer)
            tokens = template.encode(value["messages"], value.get("tools"))
        prompts.append(Prompt(str(value.get("id", len(prompts))), value["kind"], tokens))
    return prompts


def _run_one(runtime: Runtime, prompt: Prompt, params: SamplingParams, speculation: Speculation) -> Measured:
    try:
        result = run_request(runtime, prompt.tokens, params, speculation)
    except ValueError as error:
        raise CommandError(f"prompt {prompt.id}: {error}") from None
    if result.finish == "interrupted":
        raise KeyboardInterrupt
    if result.finish == "error":
        raise CommandError(f"prompt {prompt.id}: {result.error}")
    return result


def summarize(
    speculation: Speculation, prompts: Sequence[Prompt], runs: Sequence[Measured], plain: Sequence[Measured]
) -> dict[str, Any]:
    """One row of the results: sums over `runs`, and how many emitted exactly the tokens of `plain`."""
    passes = sum(run.stats.passes for run in runs)
    decode_seconds = sum(run.seconds.total - run.seconds.first_token for run in runs)
    by_kind: dict[str, list[Measured]] = defaultdict(list)
    for prompt, run in zip(prompts, runs, strict=True):
        by_kind[prompt.kind].append(run)
    reached = [sum(counts) for counts in zip(*(run.stats.reached for run in runs), strict=True)]
    accepted = [sum(counts) for counts in zip(*(run.stats.accepted for run in runs), strict=True)]
    return {
        "mode": "plain" if speculation.mode == "off" else speculation.mode,
        "budget": 0 if speculation == PLAIN else "auto" if speculation == AUTO else speculation.budget,
        "prompt_tokens": sum(run.prompt_tokens for run in runs),
        "new_tokens": sum(len(run.tokens) for run in runs),
        "tokens_per_second": round(rate(sum(len(run.tokens) - 1 for run in runs), decode_seconds), 3),
        "tokens_per_pass": round(rate(sum(run.stats.tokens for run in runs), passes), 4),
        "rows_per_pass": round(rate(sum(run.stats.rows for run in runs), passes), 3),
        "tokens_per_pass_by_kind": {
            kind: round(rate(sum(r.stats.tokens for r in some), sum(r.stats.passes for r in some)), 4)
            for kind, some in by_kind.items()
        },
        "reached": reached,
        "accepted": accepted,
        "seconds": {
            part: round(sum(run.seconds.to_json()[part] for run in runs), 4)
            for part in ("total", "prefill", "draft", "verify", "other")
        },
        "identical_to_plain": sum(a.tokens == b.tokens for a, b in zip(runs, plain, strict=True)),
        "requests": len(runs),
    }


def _line(result: dict[str, Any]) -> str:
    same = f"{result['identical_to_plain']}/{result['requests']}"
    return (
        f"{result['mode']:<6} {result['budget'] or '-':>6} {result['tokens_per_second']:>9.1f} "
        f"{result['tokens_per_pass']:>12.2f} {result['rows_per_pass']:>10.2f} {same:>9}"
    )


def commit() -> str | None:
    """Commit of the source tree, with "-dirty" where files differ from it; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
