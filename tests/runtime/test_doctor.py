import importlib.metadata
import json

from engine_runtime import doctor
from engine_runtime.cli import main

SMI = "0, NVIDIA RTX PRO 6000 Blackwell, 12.0, 97887, 4, 580.95.05, 5, 16, 16, 00000000:01:00.0\n"
TOPOLOGY = " \t\x1b[4mGPU0\tGPU1\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n  OK   = Status Ok\n"


class Machine:
    """A made-up machine: a file tree, and what nvidia-smi prints (an exception: what it raises)."""

    def __init__(self, root, smi=None, topology=TOPOLOGY, missing=()):
        self.root, self.smi, self.topology, self.missing = root, smi, topology, missing
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text("MemTotal:  33554432 kB\nMemAvailable: 16777216 kB\n")
        (root / "proc/cpuinfo").write_text("model name\t: A CPU\nflags\t\t: fpu avx2 amx_bf16\n")

    def write(self, path, text=""):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def command(self, command):
        answer = self.smi if command[1].startswith("--query-gpu") else self.topology
        if answer is None:
            raise FileNotFoundError
        if isinstance(answer, Exception):
            raise answer
        return answer

    def examine(self):
        def version(package):
            return None if package in self.missing else "1.0"

        found = doctor.Doctor(self.root, self.command, version).examine()
        assert all(bool(finding.advice) == (finding.status != "OK") for finding in found)
        return {(finding.name, finding.status): finding for finding in found}


def test_doctor_without_a_gpu(tmp_path):
    found = Machine(tmp_path).examine()
    assert {status for _, status in found} == {"OK"}
    assert found["gpu", "OK"].found == "none: CPU executor only"
    assert found["cpu", "OK"].found.startswith("A CPU, ") and "avx2, amx_bf16" in found["cpu", "OK"].found
    assert found["memory", "OK"].found == "32.0 GiB, 16.0 GiB free"


def test_doctor_host_troubles(tmp_path):
    machine = Machine(tmp_path, missing=("torch", "tiktoken", "onnx"))
    machine.write("sys/fs/cgroup/memory.max", str(2 << 30))
    found = machine.examine()
    assert found["torch", "FAIL"].advice.startswith("pip install torch")
    assert found["tiktoken", "FAIL"].advice == "pip install tiktoken: needed for text"
    assert found["memory", "WARN"].found == "2.0 GiB, 2.0 GiB free"
    assert ("onnx", "WARN") not in found  # only needed to build


def test_doctor_card_without_a_driver(tmp_path):
    machine = Machine(tmp_path)
    machine.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    machine.write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    machine.write("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n")
    machine.write("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n")  # its sound device
    assert machine.examine()["gpu", "WARN"].found == "1 NVIDIA card(s) on the PCI bus, no driver"
    machine.smi = doctor.NoAnswer("nvidia-smi: Driver/library version mismatch")
    assert "Driver/library version mismatch" in machine.examine()["gpu", "FAIL"].found


def test_doctor_tool_without_a_card(tmp_path):
    """Images for GPUs hold nvidia-smi; run on a machine without one they are CPU machines like any other."""
    machine = Machine(tmp_path, smi=doctor.NoAnswer("nvidia-smi has failed"))
    assert machine.examine()["gpu", "OK"].found == "none: CPU executor only"


def test_doctor_one_healthy_gpu(tmp_path):
    found = Machine(tmp_path, SMI, missing=("torch",)).examine()
    assert {status for _, status in found} == {"OK"}  # torch is not needed
    assert found["gpu 0", "OK"].found == (
        "NVIDIA RTX PRO 6000 Blackwell, compute capability 12.0, 96 GiB, PCIe 5 x16, --arch sm_120a"
    )
    assert found["driver", "OK"].found == "580.95.05" and ("peer access", "OK") not in found


def test_doctor_gpu_troubles(tmp_path):
    line = "0, NVIDIA A100, 8.0, 40960, 30000, 550.54, 4, 8, 16, 00000000:01:00.0\n"
    machine = Machine(tmp_path, line, missing=("cuda-core",))
    found = doctor.Doctor(tmp_path, machine.command, lambda p: None if p == "cuda-core" else "1").examine()
    warnings = [(finding.name, finding.found) for finding in found if finding.status == "WARN"]
    assert warnings == [
        ("cuda-core", "missing"),
        ("gpu 0", "NVIDIA A100, compute capability 8.0, 40 GiB, PCIe 4 x8"),
        ("gpu 0", "29.3 GiB in use"),
        ("gpu 0", "PCIe x8 of x16"),
        ("driver", "550.54"),
    ]


def test_doctor_several_gpus(tmp_path):
    two = SMI + SMI.replace("0, ", "1, ", 1)
    machine = Machine(tmp_path, two)
    found = machine.examine()
    assert found["peer access", "OK"].found == "all 1 pairs of GPUs" and ("iommu", "OK") in found
    machine.topology = TOPOLOGY.replace("X\tOK", "X\tCNS").replace("OK\tX", "CNS\tX")
    machine.smi = two.replace("97887", "48000", 1)
    machine.write("sys/class/iommu/dmar0/x")
    machine.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
    found = machine.examine()
    assert "ForceP2P=0x11" in found["peer access", "WARN"].advice
    assert found["iommu", "WARN"].found == "on (dmar0)"
    assert {("gpus", "WARN"), ("uvm_disable_hmm", "WARN")} <= set(found)
    machine.topology = doctor.NoAnswer("nvidia-smi: no")
    assert machine.examine()["peer access", "WARN"].found == "unknown"


def test_doctor_command(capsys, monkeypatch):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    statuses = [finding["status"] for finding in report["findings"]]
    assert report["status"] == max(statuses, key=("OK", "WARN", "FAIL").index)
    assert code == (report["status"] == "FAIL")
    versions = {finding["name"]: finding["found"] for finding in report["findings"]}
    assert versions["numpy"] == importlib.metadata.version("numpy")
    bad = doctor.Finding("FAIL", "python", "2.7", "use Python 3.11 or newer")
    monkeypatch.setattr(doctor.Doctor, "examine", lambda self: [bad])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "FAIL  python  2.7\n              -> use Python 3.11 or newer\n"
