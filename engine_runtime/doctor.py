"""`python -m engine_runtime doctor`: what this machine has, and what is wrong with it.

Every finding is OK, WARN or FAIL; one that is not OK says what to do. Reads /proc and /sys and asks
nvidia-smi (or, without it, the driver through cuda-bindings); changes nothing. A machine without a GPU is
fine: engines for the CPU run on it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OK, WARN, FAIL = "OK", "WARN", "FAIL"
GIB = 1 << 30

MIN_PYTHON = (3, 11)
MIN_MEMORY = 4 * GIB
MIN_DISK = 10 * GIB
MIN_SHM = 1 * GIB  # NCCL keeps its buffers between processes there; containers start with 64 MiB
MIN_DRIVER = 580  # first branch of CUDA 13, which cuda-bindings 13 and the cubins need
KERNEL_ARCHS = {"9.0": "sm_90a", "12.0": "sm_120a"}
BUSY_MIB = 1024

# package -> what cannot be done without it
REQUIRED = {"numpy": "anything", "blake3": "loading engines", "tiktoken": "text", "jinja2": "chat"}
GPU_PACKAGES = {"cuda-bindings": "the driver's interface", "cuda-core": "launching kernels"}
OTHER_PACKAGES = ("torch", "onnx", "safetensors")

_QUERY = (
    "index,name,compute_cap,memory.total,memory.used,driver_version,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,pci.bus_id"
)

Command = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Finding:
    """One line of the report. advice: what to do, empty where the status is OK."""

    status: str
    name: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it. memory in MiB; fields that nobody could tell are ""."""

    index: str
    name: str
    compute: str
    memory: str
    used: str = ""
    driver: str = ""
    pcie_gen: str = ""
    pcie_width: str = ""
    pcie_max_width: str = ""
    bus: str = ""


class NoAnswer(Exception):
    """A tool is there but does not answer as it should; the message says how."""


def call(command: Sequence[str]) -> str:
    """Output of a tool; FileNotFoundError without it, `NoAnswer` where it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} did not answer within 20 s") from None
    except PermissionError:
        raise NoAnswer(f"{command[0]} may not be run") from None
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoAnswer(f"{command[0]}: {words[0]}")
    return done.stdout


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model(root: Path = Path("/")) -> str:
    """The processor's name."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Doctor:
    """Examines the machine whose files are under `root`, with tools run by `command`."""

    def __init__(
        self,
        root: Path = Path("/"),
        command: Command = call,
        version: Callable[[str], str | None] = _version,
    ) -> None:
        self._root = root
        self._command = command
        self._version = version

    def examine(self) -> list[Finding]:
        """All findings, in the order in which to read them."""
        gpus, problem = self._find_gpus()
        findings = [self._python(), self._processor(), self._memory(), self._disk()]
        findings += self._packages(bool(gpus))
        if problem is not None:
            return [*findings, problem]
        for gpu in gpus:
            findings += self._gpu(gpu)
        if gpus:
            findings.append(self._driver(gpus[0]))
        if len(gpus) > 1:
            findings += self._several(gpus)
        return findings

    # ---- the host ----

    def _python(self) -> Finding:
        found = platform.python_version()
        if sys.version_info < MIN_PYTHON:
            return Finding(FAIL, "python", found, "use Python 3.11 or newer")
        return Finding(OK, "python", found)

    def _processor(self) -> Finding:
        flags = next(
            (line for line in _read(self._root / "proc/cpuinfo").splitlines() if line.startswith("flags")), ""
        ).split()
        wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
        return Finding(OK, "cpu", ", ".join([cpu_model(self._root), f"{usable_cores()} cores usable", *wide]))

    def _memory(self) -> Finding:
        table = {}
        for line in _read(self._root / "proc/meminfo").splitlines():
            name, _, value = line.partition(":")
            table[name] = int(value.split()[0]) * 1024
        if "MemAvailable" not in table:
            return Finding(WARN, "memory", "unknown: no /proc/meminfo", "run on Linux")
        total, free = table["MemTotal"], table["MemAvailable"]
        limit = _read(self._root / "sys/fs/cgroup/memory.max").strip()
        if limit.isdigit() and int(limit) < total:
            total, free = int(limit), min(free, int(limit))
        found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
        if free < MIN_MEMORY:
            return Finding(WARN, "memory", found, f"free memory: a build needs about {MIN_MEMORY / GIB:.0f} GiB")
        return Finding(OK, "memory", found)

    def _disk(self) -> Finding:
        here = Path.cwd()
        free = shutil.disk_usage(here).free
        found = f"{free / GIB:.0f} GiB free at {here}"
        if free < MIN_DISK:
            advice = "free some, or build elsewhere with -o: the weights of Kimi K2.6 take 600 GB"
            return Finding(WARN, "disk", found, advice)
        return Finding(OK, "disk", found)

    def _packages(self, gpu: bool) -> Iterator[Finding]:
        wanted = REQUIRED | (GPU_PACKAGES if gpu else {})
        for package, purpose in wanted.items():
            version = self._version(package)
            if version is None:
                status = FAIL if package in REQUIRED else WARN
                yield Finding(status, package, "missing", f"pip install {package}: needed for {purpose}")
            else:
                yield Finding(OK, package, version)
        for package in OTHER_PACKAGES:
            version = self._version(package)
            if version is not None:
                yield Finding(OK, package, version)
            elif package == "torch" and not gpu:
                advice = "pip install torch: without a GPU only engines for the CPU run, and they need it"
                yield Finding(FAIL, package, "missing", advice)

    # ---- GPUs ----

    def _find_gpus(self) -> tuple[list[Gpu], Finding | None]:
        """The GPUs, or the one finding that stands for there being none."""
        try:
            lines = self._command(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"])
            gpus = [Gpu(*(field.strip() for field in line.split(","))) for line in lines.splitlines() if line]
        except FileNotFoundError:
            gpus = driver_gpus() if self._root == Path("/") else []
        except (NoAnswer, TypeError) as error:
            if not self._cards() and not (self._root / "proc/driver/nvidia").is_dir():
                return [], Finding(OK, "gpu", "none: CPU executor only")
            advice = "check `dmesg` for NVRM or Xid messages, and that the driver's module and libraries match"
            return [], Finding(FAIL, "gpu", f"the driver does not answer: {error}", advice)
        if gpus:
            return gpus, None
        if self._cards():
            found = f"{len(self._cards())} NVIDIA card(s) on the PCI bus, no driver"
            return [], Finding(WARN, "gpu", found, f"install the NVIDIA driver, {MIN_DRIVER} or newer")
        return [], Finding(OK, "gpu", "none: CPU executor only")

    def _cards(self) -> list[Path]:
        """PCI display and 3D controllers of NVIDIA."""
        devices = sorted((self._root / "sys/bus/pci/devices").glob("*"))
        return [
            path
            for path in devices
            if _read(path / "vendor").strip() == "0x10de" and _read(path / "class").startswith("0x03")
        ]

    def _gpu(self, gpu: Gpu) -> Iterator[Finding]:
        name = f"gpu {gpu.index}"
        memory = f"{int(gpu.memory) / 1024:.0f} GiB" if gpu.memory.isdigit() else "memory unknown"
        link = f", PCIe {gpu.pcie_gen} x{gpu.pcie_width}" if gpu.pcie_width.isdigit() else ""
        found = f"{gpu.name}, compute capability {gpu.compute}, {memory}{link}"
        if gpu.compute not in KERNEL_ARCHS:
            archs = " and ".join(KERNEL_ARCHS.values())
            yield Finding(WARN, name, found, f"kernels exist for {archs} only: use an engine built with --arch cpu")
        else:
            yield Finding(OK, name, f"{found}, --arch {KERNEL_ARCHS[gpu.compute]}")
        if gpu.used.isdigit() and int(gpu.used) > BUSY_MIB:
            found = f"{int(gpu.used) / 1024:.1f} GiB in use"
            yield Finding(WARN, name, found, "end the processes that `nvidia-smi` lists, if the engine needs the room")
        widths = gpu.pcie_width, gpu.pcie_max_width
        if all(map(str.isdigit, widths)) and int(widths[0]) < int(widths[1]):
            found = f"PCIe x{widths[0]} of x{widths[1]}"
            yield Finding(WARN, name, found, "use a slot with all its lanes; reseat the card, check risers")

    def _driver(self, gpu: Gpu) -> Finding:
        branch = gpu.driver.partition(".")[0]
        if branch.isdigit() and int(branch) < MIN_DRIVER:
            return Finding(WARN, "driver", gpu.driver, f"update the driver to {MIN_DRIVER} or newer (CUDA 13)")
        return Finding(OK, "driver", gpu.driver or "version unknown")

    def _several(self, gpus: list[Gpu]) -> Iterator[Finding]:
        """What matters once ranks talk to each other."""
        if len({(gpu.name, gpu.memory) for gpu in gpus}) > 1:
            advice = "run ranks on equal cards (CUDA_VISIBLE_DEVICES): the slowest sets the pace"
            yield Finding(WARN, "gpus", "not all of one kind", advice)
        peers, blocked = self._peers()
        iommu = sorted(path.name for path in (self._root / "sys/class/iommu").glob("*"))
        if blocked:
            advice = (
                "turn off IOMMU and ACS (BIOS; kernel command line iommu=off), and for cards without "
                'NVLink load the driver with NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1;'
                "RMPcieP2PType=2;"
                'GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"'
            )
            yield Finding(WARN, "peer access", f"{blocked} of {peers} pairs of GPUs without it", advice)
        elif peers:
            yield Finding(OK, "peer access", f"all {peers} pairs of GPUs")
        else:
            yield Finding(WARN, "peer access", "unknown", "run `nvidia-smi topo -p2p r`: every pair should be OK")
        if iommu:
            advice = "peer copies through an IOMMU are slow or hang NCCL: boot with iommu=off (at least iommu=pt)"
            yield Finding(WARN, "iommu", f"on ({', '.join(iommu)})", advice)
        else:
            yield Finding(OK, "iommu", "off")
        hmm = _read(self._root / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm").strip()
        if blocked and hmm == "N":
            yield Finding(
                WARN,
                "uvm_disable_hmm",
                "N",
                "load nvidia_uvm with uvm_disable_hmm=1 for peer access over PCIe",
            )
        shm = self._root / "dev/shm"
        if shm.is_dir() and shutil.disk_usage(shm).total < MIN_SHM:
            found = f"{shutil.disk_usage(shm).total >> 20} MiB"
            yield Finding(WARN, "/dev/shm", found, "start the container with --ipc=host or --shm-size=8g for NCCL")

    def _peers(self) -> tuple[int, int]:
        """Pairs of GPUs, and those among them that cannot read each other's memory."""
        try:
            lines = self._command(["nvidia-smi", "topo", "-p2p", "r"]).splitlines()
        except (FileNotFoundError, NoAnswer):
            return 0, 0
        rows = [line.split() for line in lines if line.strip().startswith("GPU")]
        cells = [cell for row in rows for cell in row[1:] if cell != "X" and not cell.startswith("GPU")]
        return len(cells) // 2, sum(cell != "OK" for cell in cells) // 2


def driver_gpus() -> list[Gpu]:
    """The GPUs through cuda-bindings, for machines without nvidia-smi; none where there is no driver
    either."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return []
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return []
    except RuntimeError:  # no libcuda
        return []
    attribute = driver.CUdevice_attribute
    gpus = []
    for index in range(driver.cuDeviceGetCount()[1]):
        name = driver.cuDeviceGetName(128, index)[1].split(b"\0")[0].decode()
        major, minor = (
            driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), index)[1]
            for part in ("MAJOR", "MINOR")
        )
        memory = driver.cuDeviceTotalMem(index)[1] >> 20
        gpus.append(Gpu(str(index), name, f"{major}.{minor}", str(memory)))
    return gpus


def run(as_json: bool) -> int:
    """Print the report; 1 where anything is FAIL."""
    findings = Doctor().examine()
    worst = max((finding.status for finding in findings), key=(OK, WARN, FAIL).index)
    if as_json:
        print(json.dumps({"status": worst, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.status:<4}  {finding.name:<{width}}  {finding.found}")
            if finding.advice:
                print(f"      {'':<{width}}  -> {finding.advice}")
    return 1 if worst == FAIL else 0
