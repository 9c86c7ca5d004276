"""One build: checkpoint and drafter in, artifact out."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx

from builder.checkpoint import Checkpoint
from builder.config import DraftConfig, ModelConfig, check_draft_matches, load_draft_config, load_model_config
from builder.errors import BuildError
from builder.kernels import compile_images
from builder.options import BuildOptions
from builder.pack_stream import layout_versions
from builder.pipeline import export_passes, plan_passes
from builder.preflight import CheckpointReport, preflight, preflight_draft
from builder.writer import Staging
from plugins.core.engine_file import TENSORRT, Manifest
from plugins.core.plan import Plan

COPIED_FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
REQUIRED_FILES = ("tiktoken.model", "tokenizer_config.json")
SPLAT = "splat"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """What is built: configurations, and the opened and checked checkpoints (None for a splat build)."""

    directory: Path
    config: ModelConfig
    draft_config: DraftConfig | None
    checkpoint: Checkpoint | None = None
    report: CheckpointReport | None = None
    draft: Checkpoint | None = None
    draft_report: CheckpointReport | None = None

    def read(self, name: str) -> np.ndarray:
        """Memory-mapped checkpoint tensor; names of the drafter start with "draft:"."""
        return self._owner(name).array(name.removeprefix("draft:"))

    def drop(self, name: str) -> None:
        """Let the pages of `name` go."""
        self._owner(name).drop_pages(name.removeprefix("draft:"))

    def _owner(self, name: str) -> Checkpoint:
        owner = self.draft if name.startswith("draft:") else self.checkpoint
        if owner is None:
            raise BuildError(f"{name}: a splat build reads no checkpoint tensors")
        return owner

    @property
    def fingerprint(self) -> str:
        if self.checkpoint is None:
            return SPLAT
        prints = [self.checkpoint.fingerprint()] + ([self.draft.fingerprint()] if self.draft else [])
        return "+".join(prints)

    @property
    def router_dtype(self) -> str:
        """bfloat16 in Moonshot's files, float32 in some re-saves."""
        return self.report.router_dtype if self.report is not None else "bfloat16"


def open_source(directory: Path, draft_directory: Path | None, options: BuildOptions, progress: Progress) -> Source:
    """Read the configurations and check every shard; a splat build needs config.json alone."""
    config = load_model_config(directory)
    draft_config = load_draft_config(draft_directory) if draft_directory is not None else None
    if draft_config is not None:
        check_draft_matches(config, draft_config)
    if options.splat:
        return Source(directory, config, draft_config)
    checkpoint, draft, draft_report = Checkpoint.open(directory), None, None
    report = preflight(checkpoint, config)
    progress(f"{directory}: " + "; ".join(report.lines()))
    if draft_directory is not None and draft_config is not None:
        draft = Checkpoint.open(draft_directory)
        draft_report = preflight_draft(draft, draft_config)
        progress(f"{draft_directory}: " + "; ".join(draft_report.lines()))
    for name in REQUIRED_FILES:
        if not (directory / name).is_file():
            raise BuildError(
                f"{directory / name}: missing: the engine carries the tokenizer; download it with the checkpoint"
            )
    return Source(directory, config, draft_config, checkpoint, report, draft, draft_report)


def make_plans(source: Source, options: BuildOptions, progress: Progress, onnx_dir: Path | None = None) -> list[Plan]:
    """Plans of all ranks; the ONNX graphs are also written to `onnx_dir` where it is given."""
    passes, recipes = export_passes(source.config, source.draft_config, options, source.router_dtype, progress)
    if onnx_dir is not None:
        onnx_dir.mkdir(parents=True, exist_ok=True)
        for exported in passes:
            onnx.save(exported.model, str(onnx_dir / f"{exported.name}_{exported.bucket}.onnx"))
    return plan_passes(passes, recipes, source.config, source.draft_config, options, progress)


def build(
    source: Source,
    options: BuildOptions,
    plans: list[Plan],
    output: Path,
    progress: Progress,
    weight_progress: Callable[[int, int, str], None],
) -> Manifest:
    """Pack, write and publish the artifact `output`; resumes what an interrupted build left."""
    _check_accounting(source, plans)
    images = compile_images(plans, options.splat, progress)
    if options.tensorrt:
        images |= _tensorrt_images(plans, options, progress)
    with Staging(output) as staging:
        if not options.splat:
            packed = staging.add_weights(
                plans, source.fingerprint, source.read, done=source.drop, progress=weight_progress
            )
            kept = options.tp - len(packed)
            if kept:
                progress(f"kept the packed weights of {kept} rank(s): same checkpoint, layout and tp")
        staging.add_engines(plans, source.fingerprint, images)
        for name in COPIED_FILES:
            path = source.directory / name
            if path.is_file():
                staging.add_file(name, path.read_bytes())
        return staging.publish(_manifest(source, options, plans, output.name))


def _tensorrt_images(plans: list[Plan], options: BuildOptions, progress: Progress) -> dict[str, bytes]:
    """TensorRT plans by name in the engine file; TensorRT's version goes into the native plans."""
    from builder.tensorrt.compile import compile_plans

    found, built = compile_plans(plans, progress, options.tactics)
    for plan in plans:
        plan.settings["tensorrt"] = found
    return {TENSORRT + key: data for key, data in built.items()}


def _check_accounting(source: Source, plans: list[Plan]) -> None:
    """Every checkpoint tensor that preflight counts as part of the model must go into some weight."""
    if source.report is None:
        return
    used = {name for weight in plans[0].weights.values() for name in weight.recipe.sources}
    wanted = {name for name in source.report.consumed if not name.endswith(".weight_shape")}
    if source.draft_report is not None:
        wanted |= {f"draft:{name}" for name in source.draft_report.consumed}
    if used != wanted:
        odd = sorted(used ^ wanted)
        raise BuildError(
            f"{source.directory}: {len(odd)} tensors are expected but not used, or used but not expected, "
            f"e.g. {', '.join(odd[:3])}: this is a defect of the builder, please report it"
        )


def _manifest(source: Source, options: BuildOptions, plans: list[Plan], name: str) -> Manifest:
    settings = plans[0].settings
    return Manifest(
        name=name,
        model={**settings["model"], "model_type": source.config.model_type},
        checkpoint_fingerprint=source.fingerprint,
        tp=options.tp,
        arch=options.arch,
        activation_dtype=options.activations,
        kv_dtype=options.kv,
        weights=SPLAT if options.splat else "packed",
        layout_versions=layout_versions(plans),
        limits=settings["limits"],
        settings={"options": {**asdict(options), "tactics": None}, "draft": settings["draft"]},
        toolchain=_toolchain(),
    )


def _toolchain() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in ("torch", "onnx", "numpy", "nvidia-cuda-nvrtc", "k2-engine"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "source tree"
    return versions
