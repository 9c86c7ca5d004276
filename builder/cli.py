"""Command line of `build.py`: build, inspect and verify artifacts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from builder.options import ARCHS, VERIFY_BUCKETS

EPILOG = """\
other commands:
  build.py inspect ARTIFACT [--phase KEY] [--html FILE]   plan, memory map and per-step costs of an artifact
  build.py verify ARTIFACT                                re-read every byte against the digests
"""


def main(argv: list[str] | None = None) -> int:
    """Run `argv` (default: the process's); returns the exit code. User errors are one sentence on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {"inspect": _inspect, "verify": _verify}
    command = commands.get(arguments[0]) if arguments else None
    from builder.errors import BuildError
    from plugins.core.engine_file import EngineError
    from plugins.core.plugin import PluginError

    try:
        return command(arguments[1:]) if command else _build(arguments)
    except (BuildError, PluginError, EngineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`: stop without a traceback, also at the interpreter's last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted: the same command resumes the build", file=sys.stderr)
        return 130


def _build(arguments: list[str]) -> int:
    args = _parser().parse_args(arguments)
    from builder.build import build, make_plans, open_source
    from builder.options import BuildOptions

    options = BuildOptions(
        tp=args.tp,
        arch=args.arch,
        activation_dtype=args.activation_dtype,
        kv_dtype=args.kv_dtype,
        max_context=args.max_context,
        max_requests=args.max_requests,
        kv_tokens=args.kv_tokens,
        prefill_chunk=args.prefill_chunk,
        verify_buckets=args.verify_buckets,
        mla_norm_eps=args.mla_norm_eps,
        draft_rope_amplitude=args.draft_rope_amplitude,
        splat=args.splat,
        tensorrt=args.tensorrt,
        tactics=args.tactics,
    )
    if args.output is None and not args.describe:
        raise _parser().error("-o/--output is required (or --describe)")
    started = time.monotonic()
    log = Log()
    source = open_source(args.checkpoint, args.draft, options, log.line)
    plans = make_plans(source, options, log.line, args.onnx)
    if args.describe:
        from builder.describe import describe

        log.end()
        print(describe(plans))
        return 0
    manifest = build(source, options, plans, args.output, log.line, log.weights)
    log.end()
    size = sum(record.bytes for record in manifest.files.values())
    print(f"{args.output}: {options.tp} rank(s), {size / 1e6:,.1f} MB, {time.monotonic() - started:.1f} s")
    return 0


def _inspect(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="build.py inspect", description="Show what an artifact will do.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--phase", help="list the steps of one phase, e.g. 'verify[8]'")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page with pictures")
    args = parser.parse_args(arguments)
    from builder.describe import describe, load_plans
    from builder.report import write_html
    from builder.tensorrt.report import side_by_side, tensorrt_plans

    plans = load_plans(args.artifact)
    print(describe(plans, phase=args.phase))
    built = tensorrt_plans(args.artifact)
    if built:
        print(f"\n{side_by_side(plans[0], built)}")
    if args.html is not None:
        write_html(plans, args.html)
        print(f"\nwrote {args.html}")
    return 0


def _verify(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="build.py verify", description="Re-read every byte of an artifact.")
    parser.add_argument("artifact", type=Path)
    args = parser.parse_args(arguments)
    from plugins.core.engine_file import verify_artifact

    log = Log()
    manifest = verify_artifact(args.artifact, log.weights)
    log.end()
    size = sum(record.bytes for record in manifest.files.values())
    print(f"{args.artifact}: {len(manifest.files)} files, {size / 1e6:,.1f} MB, every digest as built")
    return 0


class Log:
    """Progress on stderr: one line that is rewritten on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def line(self, message: str) -> None:
        """A step of the build."""
        if self._terminal:
            print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
        else:
            print(message, file=sys.stderr)

    def weights(self, done: int, total: int, name: str) -> None:
        """`done` of `total` bytes, now at file or weight `name`; at most a few lines a second."""
        now = time.monotonic()
        if now - self._last < (0.1 if self._terminal else 5.0) and done < total:
            return
        self._last = now
        self.line(f"{100 * done / max(total, 1):5.1f} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {name}")

    def end(self) -> None:
        """Leave the rewritten line."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _buckets(text: str) -> tuple[int, ...]:
    try:
        values = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers separated by commas") from None
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive numbers")
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build.py",
        description="Compile a Kimi K2-family checkpoint into one engine per GPU.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="directory with config.json and safetensors shards")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="DFlash drafter checkpoint")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="artifact to write, e.g. artifacts/NAME")
    parser.add_argument("--describe", action="store_true", help="print the plan and its costs, build nothing")
    parser.add_argument("--onnx", type=Path, metavar="DIR", help="also write the exported ONNX graphs")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--arch", choices=ARCHS, default="sm_120a", help="target (default sm_120a)")
    parser.add_argument("--activation-dtype", choices=("float32", "bfloat16"), help="default by arch")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), help="default: the activation dtype")
    parser.add_argument("--max-context", type=int, metavar="N", help="tokens of one request")
    parser.add_argument("--max-requests", type=int, default=4, metavar="N", help="requests at a time (default 4)")
    parser.add_argument("--kv-tokens", type=int, metavar="N", help="tokens in the KV pool, all requests together")
    parser.add_argument("--prefill-chunk", type=int, metavar="N", help="prompt tokens a pass")
    parser.add_argument(
        "--verify-buckets",
        type=_buckets,
        default=VERIFY_BUCKETS,
        metavar="LIST",
        help=f"row counts of the verify passes (default {','.join(map(str, VERIFY_BUCKETS))})",
    )
    parser.add_argument(
        "--mla-norm-eps",
        type=float,
        default=1e-6,
        metavar="EPS",
        help="eps of the two norms inside MLA (default 1e-6, as the reference code; vLLM uses 1e-5)",
    )
    parser.add_argument(
        "--draft-rope-amplitude",
        type=float,
        metavar="A",
        help="YaRN factor on the drafter's cos and sin (default: its attention_factor, else 0.1 ln(factor) + 1)",
    )
    parser.add_argument("--tensorrt", action="store_true", help="also build TensorRT plans (docs/tensorrt.md)")
    parser.add_argument(
        "--tactics", type=Path, metavar="FILE", help="with --tensorrt: times by `python -m engine_runtime tactics`"
    )
    parser.add_argument("--splat", action="store_true", help="synthetic weights: needs config.json alone")
    return parser
