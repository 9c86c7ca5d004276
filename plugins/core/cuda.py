"""CUDA kernels at build time: compiling a `Launch`'s source to a cubin, and what the cubin asks of the chip."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from plugins.core.plugin import Launch, PluginError

ROOT = Path(__file__).parents[1]  # sources are named relative to plugins/
DEVICE_HEADERS = ROOT / "core" / "device"
ARCHS = ("sm_90a", "sm_120a")
MULTIPROCESSORS = {"sm_90a": 132, "sm_120a": 188}  # H200, RTX PRO 6000 Blackwell
MAX_SHARED_BYTES = 101_376  # of a block on sm_120a, the smaller of the two
SYSTEM_SHARED_BYTES = 1024  # that the system takes beside them, of every block
REGISTERS = 65_536  # of a multiprocessor, in both
_IMPORTING = Lock()  # cuda-core's first import does not bear two threads


def compile_launch(launch: Launch, arch: str) -> bytes:
    """The cubin of `launch` for `arch`, compiled by NVRTC; equal inputs give equal bytes.

    Raises `PluginError` where the compiler is not installed or refuses the source.
    """
    try:
        with _IMPORTING:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise PluginError(f"{launch.source}: CUDA kernels need the extra `cuda` of this package: {error}") from None
    path = ROOT / launch.source
    options = ProgramOptions(
        name=launch.source,
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in launch.constants] or None,
        include_path=[str(path.parent), str(ROOT), str(DEVICE_HEADERS)],
    )
    program = Program(path.read_text(), "c++", options)
    try:
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda-core raises what NVRTC says in types of its own
        raise PluginError(f"{launch.source} for {arch} with {dict(launch.constants)}: {error}") from None
    finally:
        program.close()


def divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def float_bits(value: float) -> int:
    """A float32 constant of a kernel as the integer that carries it."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers a thread, bytes of stack a thread (spills show here), shared bytes of a block beside
    the dynamic ones (1024 that the system takes included), and the most threads a block may have.
    """

    registers: int
    stack: int
    shared: int
    max_threads: int


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Resources of every kernel of a cubin, by name, from its ELF sections; raises `ValueError` for anything else."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("expected a 64-bit ELF file")
    offset, entry, count, names_index = struct.unpack_from("<Q10xHHH", cubin, 40)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * entry) for i in range(count)]
    names_at = headers[names_index][4]

    def text(at: int) -> str:
        return cubin[at : cubin.index(b"\0", at)].decode()

    sections = {text(names_at + header[0]): header for header in headers}
    symbols = sections[".symtab"]
    symbol_names = [
        text(headers[symbols[6]][4] + struct.unpack_from("<I", cubin, at)[0])
        for at in range(symbols[4], symbols[4] + symbols[5], 24)
    ]
    registers, stacks = {}, {}
    for code, symbol, value in _attributes(cubin, sections[".nv.info"]):
        if code == 0x2F:  # EIATTR_REGCOUNT: symbol, count
            registers[symbol_names[symbol]] = value
        elif code == 0x11:  # EIATTR_FRAME_SIZE: symbol, bytes
            stacks[symbol_names[symbol]] = value
    found = {}
    for name in sections:
        match = re.fullmatch(r"\.text\.(.+)", name)
        if match is None:
            continue
        kernel = match[1]
        attributes = _attributes(cubin, sections[f".nv.info.{kernel}"])
        shared = sections.get(f".nv.shared.{kernel}")
        found[kernel] = Resources(
            registers=registers[kernel],
            stack=stacks[kernel],
            shared=0 if shared is None else shared[5],
            max_threads=next(value for code, value, _ in attributes if code == 0x05),  # EIATTR_MAX_THREADS
        )
    return found


def _attributes(cubin: bytes, header: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(code, first word, second word) of the sized entries of an .nv.info section; missing words are 0."""
    at, end = header[4], header[4] + header[5]
    entries = []
    while at < end:
        form, code, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == 4:  # EIFMT_SVAL: a payload of `size` bytes follows
            words = struct.unpack_from(f"<{size // 4}I", cubin, at)
            entries.append((code, *(*words, 0, 0)[:2]))
            at += size
    return entries
