"""The plan: what one rank runs, as data. The builder writes it, every executor (cpu, null, cuda) reads it.

A plan holds, per phase and bucket, a flat list of steps. Every argument of a step is an address: an offset in the
arena, a weight, a persistent buffer, or absent. At run time no shape is computed and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from plugins.core.packing import WeightRecipe
from plugins.core.plugin import Launch
from plugins.core.spec import TensorSpec

PLAN_VERSION = 1
ARENA_ALIGNMENT = 256  # bytes; what a 16-byte vector load, a bulk copy and a TMA box all accept


@dataclass(frozen=True)
class Arg:
    """One operand of a step.

    kind: "arena" (offset in bytes from the arena's start), "weight" (name in `Plan.weights`), "buffer" (name in
    `Plan.buffers`; the operand is its first `spec.nbytes` bytes) or "none" (an optional operand left out).
    name: the value, weight or buffer name. spec: what the operator sees there.
    """

    kind: str
    name: str = ""
    offset: int = 0
    spec: TensorSpec | None = None

    def to_json(self) -> list[Any]:
        shape = None if self.spec is None else [list(self.spec.shape), self.spec.dtype]
        return [self.kind, self.name, self.offset, shape]

    @staticmethod
    def from_json(value: list[Any]) -> Arg:
        kind, name, offset, shape = value
        return Arg(kind, name, offset, None if shape is None else TensorSpec(tuple(shape[0]), shape[1]))


NO_ARG = Arg("none")


def pair(names: Sequence[str], args: Sequence[Arg]) -> list[tuple[str, Arg]]:
    """Operand names with their addresses; optional ones at the end may be missing from `args`."""
    padded = [*args, *[NO_ARG] * (len(names) - len(args))]
    return [(name.removesuffix("?"), arg) for name, arg in zip(names, padded, strict=True)]


@dataclass(frozen=True)
class Step:
    """One operator call: `node` is its name in the graph, `workspace` its scratch in the arena ("none" if unused)."""

    node: str
    plugin: str
    tactic: str
    attrs: dict[str, Any]
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    workspace: Arg = NO_ARG
    launches: tuple[Launch, ...] = ()

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "node": self.node,
            "plugin": self.plugin,
            "tactic": self.tactic,
            "attrs": self.attrs,
            "inputs": [arg.to_json() for arg in self.inputs],
            "outputs": [arg.to_json() for arg in self.outputs],
        }
        if self.workspace.kind != "none":
            value["workspace"] = self.workspace.to_json()
        if self.launches:
            value["launches"] = [asdict(launch) for launch in self.launches]
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> Step:
        return Step(
            node=value["node"],
            plugin=value["plugin"],
            tactic=value["tactic"],
            attrs=value["attrs"],
            inputs=tuple(Arg.from_json(arg) for arg in value["inputs"]),
            outputs=tuple(Arg.from_json(arg) for arg in value["outputs"]),
            workspace=Arg.from_json(value["workspace"]) if "workspace" in value else NO_ARG,
            launches=tuple(_launch(launch) for launch in value.get("launches", ())),
        )


def _launch(value: dict[str, Any]) -> Launch:
    geometry = {key: tuple(value[key]) for key in ("grid", "block", "cluster", "scalars")}
    return Launch(**{**value, **geometry, "constants": tuple((name, number) for name, number in value["constants"])})


@dataclass(frozen=True)
class Phase:
    """One fixed-shape pass, e.g. verify with 16 token rows. `key` is "verify[16]"."""

    name: str
    bucket: int
    steps: tuple[Step, ...]

    @property
    def key(self) -> str:
        return f"{self.name}[{self.bucket}]"


@dataclass(frozen=True)
class Weight:
    """A packed weight of this rank: its spec and how it is made ("splat" fills it synthetically at load)."""

    spec: TensorSpec
    recipe: WeightRecipe


@dataclass
class Plan:
    """Everything one rank needs beside its weight bytes. `weights` is in upload order (order of first use)."""

    tp: int
    rank: int
    arch: str
    activation_dtype: str
    arena_bytes: int
    buffers: dict[str, TensorSpec]
    weights: dict[str, Weight]
    phases: dict[str, Phase]
    settings: dict[str, Any] = field(default_factory=dict)
    version: int = PLAN_VERSION

    def buckets(self, phase: str) -> list[int]:
        """Ascending buckets of `phase`; empty if the engine has none."""
        return sorted(p.bucket for p in self.phases.values() if p.name == phase)

    def weight_bytes(self) -> int:
        return sum(weight.spec.nbytes for weight in self.weights.values())

    def buffer_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.buffers.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "tp": self.tp,
            "rank": self.rank,
            "arch": self.arch,
            "activation_dtype": self.activation_dtype,
            "arena_bytes": self.arena_bytes,
            "settings": self.settings,
            "buffers": {name: spec.to_json() for name, spec in self.buffers.items()},
            "weights": {
                name: {"spec": weight.spec.to_json(), "recipe": weight.recipe.to_json()}
                for name, weight in self.weights.items()
            },
            "phases": [
                {"name": p.name, "bucket": p.bucket, "steps": [step.to_json() for step in p.steps]}
                for p in self.phases.values()
            ],
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        phases = [
            Phase(p["name"], p["bucket"], tuple(Step.from_json(step) for step in p["steps"])) for p in value["phases"]
        ]
        return Plan(
            tp=value["tp"],
            rank=value["rank"],
            arch=value["arch"],
            activation_dtype=value["activation_dtype"],
            arena_bytes=value["arena_bytes"],
            settings=value["settings"],
            buffers={name: TensorSpec.from_json(spec) for name, spec in value["buffers"].items()},
            weights={
                name: Weight(TensorSpec.from_json(w["spec"]), WeightRecipe.from_json(w["recipe"]))
                for name, w in value["weights"].items()
            },
            phases={phase.key: phase for phase in phases},
            version=value["version"],
        )
