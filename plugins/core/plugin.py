"""The plugin interface: one class per operator, owning its schema, its tactics and its reference.

A plugin folder holds `plugin.py` (a `Plugin` subclass, exported as `PLUGIN`), `reference.py` (plain torch), `pack.py`
where the operator has weights in a layout of its own, and its CUDA kernels. See docs/adding-a-plugin.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from plugins.core.spec import TensorSpec

if TYPE_CHECKING:
    import torch

Attrs = dict[str, Any]
ATTR_KINDS = {"int": int, "float": float, "str": str, "bool": bool}

# Every operator of the graph; the folder name under plugins/ is the operator name in the ONNX domain "k2".
PLUGIN_NAMES = (
    "all_gather",
    "all_reduce",
    "ddtree_accept",
    "ddtree_build",
    "dense_gemm",
    "draft_attention",
    "draft_kv_append",
    "draft_tokens",
    "draft_topk",
    "embed",
    "gather_rows",
    "int4_marlin_gemm",
    "kv_compact",
    "mla_attention",
    "mla_prepare",
    "moe_route",
    "rms_norm",
    "sample",
)


class PluginError(Exception):
    """A node that a plugin cannot take; the message names operator, operand, expected and found."""


@dataclass(frozen=True)
class Launch:
    """One CUDA kernel of a step: what is compiled, and how it is started.

    source: file under plugins/; kernel: its extern "C" function; constants: the macros it is compiled with.
    Geometry in blocks and threads; `smem` is dynamic shared memory in bytes. With `pdl` the kernel may start before
    its predecessor in the stream has ended (programmatic dependent launch) and waits for it by itself. `scalars` are
    64-bit integers passed after the addresses: what differs between steps that share one image, as a layer's number.
    """

    source: str
    kernel: str
    constants: tuple[tuple[str, int | str], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    pdl: bool = True
    scalars: tuple[int, ...] = ()

    @property
    def image(self) -> str:
        """Name of the compiled kernel image in the engine file: source and constants."""
        return f"{self.source}?{'&'.join(f'{name}={value}' for name, value in self.constants)}"


def _always(attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> str | None:
    return None


@dataclass(frozen=True)
class Tactic:
    """One way to run an operator. `refuses(attrs, inputs)` gives the reason why it cannot take a shape, or None.

    `workspace` is scratch in bytes, placed in the arena for the time of the step. `launches(attrs, inputs, arch)` are
    the kernels of a step, started in this order; None for the reference. Each gets the same arguments: the addresses of
    all inputs, all outputs and the workspace, 0 for what is absent, then its own `scalars`.
    """

    name: str
    archs: tuple[str, ...]
    refuses: Callable[[Attrs, Sequence[TensorSpec | None]], str | None] = _always
    workspace: Callable[[Attrs, Sequence[TensorSpec | None]], int] | None = None
    launches: Callable[[Attrs, Sequence[TensorSpec | None], str], tuple[Launch, ...]] | None = None


REFERENCE = Tactic(name="reference", archs=("cpu",))


class Communicator(Protocol):
    """What a collective needs of the transport between tensor-parallel ranks."""

    rank: int
    world: int

    def all_gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """`value` of every rank, in rank order, on every rank."""
        ...


Runner = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...] | None"]


@dataclass
class Plugin:
    """One operator. Subclasses set the fields and implement `infer` and `reference`.

    inputs: operand names in order; a name ending in "?" may be absent (None).
    outputs: result names in order; a name ending in "?" exists only in a form of the operator that fusion makes.
    attrs: attribute name -> kind ("int", "float", "str", "bool"); every attribute is required in a node.
    mutates: names of inputs that the operator writes in place (persistent buffers only).
    sharded_attrs: attributes that are divided by tp when a graph is sharded (e.g. num_heads).
        "tp_rank" and "tp_world", where an operator has them, are set to the rank and the number of ranks.
    tactics: tried in order by the builder; the first that takes arch and shape is chosen.
    """

    name: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attrs: dict[str, str] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    sharded_attrs: tuple[str, ...] = ()
    tactics: tuple[Tactic, ...] = (REFERENCE,)

    def infer(self, attrs: Attrs, inputs: Sequence[TensorSpec | None]) -> list[TensorSpec]:
        """Output specs; raises `PluginError` naming the operand where the inputs do not fit."""
        raise NotImplementedError

    def cost(
        self,
        attrs: Attrs,
        inputs: Sequence[TensorSpec | None],
        outputs: Sequence[TensorSpec],
        context: int,
    ) -> tuple[int, int]:
        """(bytes moved, floating point operations) of one call at `context` committed tokens a request.

        The default counts every operand once and no arithmetic; operators that read a part of an operand (the KV
        pool, the routed experts) or that compute say so themselves.
        """
        operands = [spec for spec in inputs if spec is not None] + list(outputs)
        return sum(spec.nbytes for spec in operands), 0

    def prepare(self, attrs: Attrs, operand: str, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        """CPU only, once at load: what `reference` is given for the packed `weight` of `operand`.

        `dtype` is the activation dtype of the plan. The default turns bfloat16 weights into `dtype` (exact for
        float32) and leaves everything else alone; operators with a layout of their own undo it here.
        """
        import torch

        return weight.to(dtype) if weight.dtype == torch.bfloat16 else weight

    def reference(self, attrs: Attrs, comm: Communicator) -> Runner:
        """The CPU body: a callable of the operands (torch tensors, None where absent) giving the outputs.

        Mutated operands are written in place. It must not keep state between calls.
        """
        raise NotImplementedError

    def expect(self, condition: bool, operand: str, expected: str, found: object) -> None:
        """Raise a `PluginError` in the house form unless `condition` holds."""
        if not condition:
            raise PluginError(f"{self.name}: {operand}: expected {expected}, found {found}")


_REGISTRY: dict[str, Plugin] = {}


def get_plugin(name: str) -> Plugin:
    """The plugin `name`, imported on first use; raises `PluginError` for a name that is not in `PLUGIN_NAMES`."""
    if name not in PLUGIN_NAMES:
        raise PluginError(f"operator {name!r} is not a plugin: expected one of {', '.join(PLUGIN_NAMES)}")
    if name not in _REGISTRY:
        _REGISTRY[name] = import_module(f"plugins.{name}.plugin").PLUGIN
    return _REGISTRY[name]
