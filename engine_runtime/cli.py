"""The command line: generate, bench, bench serve, compare, serve, doctor.

Exit codes: 0; 1 with one sentence on stderr; 130 after Ctrl-C (what was printed until then stays).
Everything but argparse is imported by the command that needs it, so that help and errors come at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine_runtime.server.config import add_arguments as add_serve_arguments

INTERRUPTED = 130
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended


class CommandError(Exception):
    """What the user asked for cannot be done; the message is one sentence."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without argparse's usage block, and with exit code 1."""
        self.exit(1, f"error: {message} (see `{self.prog} --help`)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m engine_runtime", description="Run engines made by build.py.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="generate text for one prompt, printed as it comes")
    generate.add_argument("artifact", metavar="ARTIFACT", help="engine directory")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue")
    source.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue, - for stdin")
    source.add_argument("--chat", metavar="TEXT", help="message to answer, through the chat template")
    generate.add_argument("--system", metavar="TEXT", help="system message (with --chat)")
    generate.add_argument("--no-thinking", action="store_true", help="answer at once (with --chat)")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0: greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="X", help="default 1: off")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="default 0: off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="X", help="default 0: off")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal text")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    drafting = generate.add_argument_group("speculation")
    drafting.add_argument(
        "--speculate", choices=("tree", "chain", "off"), help="default: tree where the engine has a drafter"
    )
    drafting.add_argument("--budget", type=int, metavar="N", help="nodes of each tree beside its root")
    output = generate.add_argument_group("output")
    output.add_argument("--stats", action="store_true", help="then print counts and times")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end instead")

    bench = commands.add_parser("bench", help="speed of plain, chain and tree decoding over a set of prompts")
    bench.add_argument("artifact", metavar="ARTIFACT", help="engine directory")
    bench.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with id, kind and text or messages; default: K2-Nano's held-out",
    )
    bench.add_argument("--requests", type=int, default=12, metavar="N", help="prompts, default %(default)s")
    bench.add_argument("--max-tokens", type=int, default=64, metavar="N", help="for each, default %(default)s")
    bench.add_argument("--budgets", default="0,4,8,16,auto", metavar="N,N,..", help="default %(default)s; 0 is plain")
    bench.add_argument(
        "--profile", metavar="PHASE", help="then times of a pass by operator and layer, e.g. 'verify[8]'"
    )
    bench.add_argument("--context", type=int, default=0, metavar="N", help="tokens before the profiled pass, default 0")
    bench.add_argument("--picture", metavar="FILE", help="write the profile as an SVG picture")
    bench.add_argument("--json", metavar="FILE", help="write the results there as well, - for stdout only")

    compare = commands.add_parser("compare", help="every step of a GPU engine against its operator's reference")
    compare.add_argument("artifact", metavar="ARTIFACT", help="engine directory, of one rank")
    compare.add_argument("--passes", type=int, default=2, metavar="N", help="of each phase, default %(default)s")
    compare.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts")

    tactics = commands.add_parser("tactics", help="time TensorRT's kernels against ours, for build.py --tactics")
    tactics.add_argument("artifact", metavar="ARTIFACT", help="engine directory, built with --tensorrt")
    tactics.add_argument("-o", "--output", metavar="FILE", required=True, help="JSON file to write")

    serve = commands.add_parser("serve", help="serve the OpenAI and Anthropic APIs over HTTP")
    serve.add_argument("artifact", metavar="ARTIFACT", help="engine directory")
    add_serve_arguments(serve)

    clients = commands.add_parser("bench-serve", help="bench serve URL: what the clients of a running server see")
    clients.add_argument("url", metavar="URL", help="of the server, e.g. http://127.0.0.1:8000")
    clients.add_argument(
        "--prompts", metavar="FILE", help="as for bench; texts go to /v1/completions, messages to chat"
    )
    clients.add_argument("--requests", type=int, default=12, metavar="N", help="prompts, default %(default)s")
    clients.add_argument("--repeat", type=int, default=1, metavar="N", help="times each; the second finds its prefix")
    clients.add_argument("--concurrency", type=int, default=1, metavar="N", help="clients at once (closed loop)")
    clients.add_argument("--rate", type=float, metavar="X", help="requests a second at random times (open loop)")
    clients.add_argument("--max-tokens", type=int, default=64, metavar="N", help="for each, default %(default)s")
    clients.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default 0: greedy")
    clients.add_argument("--seed", type=int, default=0, metavar="N", help="of the answers and of the arrival times")
    clients.add_argument("--no-thinking", action="store_true", help="let chat answer at once")
    clients.add_argument("--api-key", metavar="KEY", help="sent as bearer token")
    clients.add_argument("--json", metavar="FILE", help="write a record that --replay takes")
    clients.add_argument("--replay", metavar="FILE", help="take all settings from a record")

    doctor = commands.add_parser("doctor", help="what this machine has and what is wrong with it")
    doctor.add_argument("--json", action="store_true", help="print JSON")

    for command in (generate, bench):
        command.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads a rank (default 1)")
        command.add_argument("--tensorrt", action="store_true", help="run the engine's TensorRT plans")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "doctor":
        from engine_runtime import doctor

        return doctor.run(as_json=args.json)
    if args.command == "bench-serve":
        from engine_runtime import bench_serve

        return bench_serve.run(args)
    if args.command == "compare":
        from engine_runtime import compare

        return compare.run(args)
    if args.command == "tactics":
        from engine_runtime import tactics

        return tactics.run(args)
    if args.command == "serve":
        from engine_runtime.server import serve

        return serve.run(args)
    if args.threads < 1:
        raise CommandError(f"--threads: expected at least 1, found {args.threads}")
    if args.command == "generate":
        from engine_runtime import generate

        return generate.run(args)
    from engine_runtime import bench

    return bench.run(args)


def _explain(error: Exception) -> str | None:
    """The sentence for an error that is the user's or the machine's; None for a fault of this program."""
    if isinstance(error, CommandError):
        return str(error)
    from engine_runtime.engine import EngineError
    from engine_runtime.ranks import RankError
    from engine_runtime.tokenizer import TokenizerError

    known: tuple[type[Exception], ...] = (EngineError, RankError, TokenizerError)
    if "plugins.core.kernel" in sys.modules:
        from engine_runtime.executor.collectives import CollectiveError
        from engine_runtime.executor.device import DeviceTimeout
        from plugins.core.kernel import CudaError

        known += (CollectiveError, CudaError, DeviceTimeout)
    if "engine_runtime.chat" in sys.modules:
        from engine_runtime.chat import ChatError

        known += (ChatError,)
    return str(error).splitlines()[0] if isinstance(error, known) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:2] == ["bench", "serve"]:
        arguments[:2] = ["bench-serve"]
    try:
        args = _parser().parse_args(arguments)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 0
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read stdout is gone; keep the interpreter from complaining when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        sentence = _explain(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        return 1
