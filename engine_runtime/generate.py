"""`python -m engine_runtime generate`: one prompt, printed as it is generated."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.cli import INTERRUPTED, CommandError
from engine_runtime.measure import Measured, acceptance, rate, run_request
from engine_runtime.sampling import SamplingParams
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import read_manifest

if TYPE_CHECKING:
    from engine_runtime.runtime import Runtime


def run(args: argparse.Namespace) -> int:
    """Carry out the command; `args` as `engine_runtime.cli` parses them. Returns the exit code."""
    if args.chat is None and (args.system is not None or args.no_thinking):
        raise CommandError("--system and --no-thinking go with --chat, found no --chat")
    try:
        params = SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            seed=args.seed,
            max_tokens=args.max_tokens,
            stop_ids=() if args.ignore_eos else None,
        )
        speculation = Speculation(args.speculate or "tree", args.budget)
    except ValueError as error:
        raise CommandError(str(error)) from None
    text = args.prompt if args.prompt_file is None else _read(args.prompt_file)
    if not read_manifest(args.artifact).limits.get("draft_depth"):
        if args.speculate in ("tree", "chain") or args.budget:
            raise CommandError(f"{args.artifact} has no drafter: leave --speculate and --budget out")
        speculation = PLAIN
    tokenizer = Tokenizer.load(args.artifact)
    prompt = tokenizer.encode(text) if args.chat is None else _chat_prompt(args, tokenizer)

    from engine_runtime.runtime import Runtime

    with Runtime.open(args.artifact, threads=args.threads, profile=args.stats, tensorrt=args.tensorrt) as runtime:
        printer = _Printer(tokenizer, silent=args.json)
        try:
            result = run_request(runtime, prompt, params, speculation, printer.push)
        except ValueError as error:
            raise CommandError(str(error)) from None
        printer.close()
        if args.json:
            print(json.dumps(_report(args, tokenizer, result, runtime), ensure_ascii=False))
        elif args.stats:
            print(f"\n{stats_table(result, runtime)}")
    if result.finish == "error":
        print(f"error: {result.error}", file=sys.stderr)
        return 1
    return INTERRUPTED if result.finish == "interrupted" else 0


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--prompt-file {name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--prompt-file {name}: not UTF-8 at byte {error.start}") from None


def _chat_prompt(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    from engine_runtime.chat import ChatTemplate

    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages.append({"role": "user", "content": args.chat})
    return ChatTemplate.load(args.artifact, tokenizer).encode(messages, thinking=not args.no_thinking)


class _Printer:
    """Prints tokens as they come; a character that is not complete waits for its rest."""

    def __init__(self, tokenizer: Tokenizer, silent: bool) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream()
        self._silent = silent

    def push(self, tokens: tuple[int, ...], last: bool) -> None:
        self._print(self._stream.push(_without_stop(self._tokenizer, tokens) if last else tokens))

    def close(self) -> None:
        self._print(self._stream.flush() + "\n")

    def _print(self, text: str) -> None:
        if text and not self._silent:
            sys.stdout.write(text)
            sys.stdout.flush()


def _without_stop(tokenizer: Tokenizer, tokens: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Without the id that ended the turn, which is not part of the text."""
    return tuple(tokens[:-1] if tokens and tokens[-1] in tokenizer.stop_ids else tokens)


def _report(args: argparse.Namespace, tokenizer: Tokenizer, result: Measured, runtime: Runtime) -> dict[str, Any]:
    plugins = runtime.plugin_seconds or {}
    shown = _without_stop(tokenizer, result.tokens)
    return {
        "engine": args.artifact,
        "text": tokenizer.decode(shown),
        "tokens": result.tokens,
        "finish": result.finish,
        "error": result.error,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "tokens_per_second": round(result.tokens_per_second, 3),
        "tokens_per_pass": round(result.stats.tokens_per_pass, 4),
        "mean_tree_rows": round(rate(result.stats.rows, result.stats.passes), 3),
        "acceptance": acceptance(result.stats),
        "seconds": result.seconds.to_json(),
        "plugin_seconds": {name: round(value, 6) for name, value in plugins.items()},
    }


def stats_table(result: Measured, runtime: Runtime) -> str:
    """Counts, acceptance by depth and times of a request, as text."""
    stats, seconds = result.stats, result.seconds
    passes = f"{stats.passes:,} passes, {stats.drafted_passes:,} drafted"
    lines = [
        f"prompt tokens    {result.prompt_tokens:>9,}",
        f"new tokens       {len(result.tokens):>9,}   ended by {result.finish}",
        f"tokens/s         {result.tokens_per_second:>9.1f}   first after {seconds.first_token:.3f} s",
        f"tokens/pass      {stats.tokens_per_pass:>9.2f}   {passes}",
        f"rows/pass        {rate(stats.rows, stats.passes):>9.2f}   root included",
    ]
    depths = acceptance(stats)
    if depths:
        lines.append("depth     reached  accepted   rate")
        lines += [f"{d['depth']:>5} {d['reached']:>11,} {d['accepted']:>9,} {d['rate']:>6.0%}" for d in depths]
    lines.append("time            s  share")
    for part in ("prefill", "draft", "verify", "other"):
        value = getattr(seconds, part)
        lines.append(f"{part:<9} {value:>7.3f} {rate(value, seconds.total):>6.0%}")
    if runtime.plugin_seconds:
        lines.append("plugin                  s  share")
        ordered = sorted(runtime.plugin_seconds.items(), key=lambda item: -item[1])
        lines += [f"{name:<17} {value:>7.3f} {rate(value, seconds.total):>6.0%}" for name, value in ordered]
    return "\n".join(lines)
