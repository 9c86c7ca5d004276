"""Who may import whom: the builder and the runtime never meet, and a GPU machine needs neither torch nor onnx."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The CPU executor computes with torch, and its ranks meet over torch's gloo. Both are imported on demand.
USES_TORCH = {
    "engine_runtime.executor.cpu",
    "engine_runtime.executor.gloo",
    "plugins.core.reference_math",
    "plugins.core.torch_dtypes",
}


def modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def imported(module: str) -> set[str]:
    """Top-level packages that `module` names in any import statement."""
    path = ROOT / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("builder", {"engine_runtime", "tests"}),
        ("engine_runtime", {"builder", "onnx", "tests"}),
        ("plugins", {"builder", "engine_runtime", "onnx", "tests"}),
    ],
)
def test_packages_keep_apart(package, forbidden) -> None:
    for module in modules(package):
        assert not imported(module) & forbidden, module


def test_runtime_and_plugins_import_without_torch_and_onnx() -> None:
    names = [
        name
        for name in modules("engine_runtime") + modules("plugins")
        if name not in USES_TORCH and not name.endswith((".reference", "__main__"))
    ]
    assert "engine_runtime.decoder" in names and "plugins.int4_marlin_gemm.pack" in names
    code = "import sys, importlib\nsys.modules['torch'] = sys.modules['onnx'] = None\n"
    code += "".join(f"importlib.import_module({name!r})\n" for name in names)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
