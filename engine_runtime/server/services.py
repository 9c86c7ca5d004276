"""What the endpoints are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from engine_runtime.budget import PLAIN, Speculation
from engine_runtime.sampling import SamplingParams
from engine_runtime.server.chat_core import Room
from engine_runtime.server.contract import BadRequest, ChatRunner, Engine
from engine_runtime.server.engine_client import EngineClient
from engine_runtime.server.metrics import Metrics
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import MANIFEST_NAME, Manifest, read_manifest
from plugins.core.state import Limits


@dataclass(frozen=True)
class ModelInfo:
    """The engine that is served. fingerprint: BLAKE3 of its engine.json, which holds the digests of all its files."""

    name: str
    manifest: Manifest
    fingerprint: str
    created: int

    @property
    def limits(self) -> Limits:
        return Limits(**self.manifest.limits)

    @property
    def vocab_size(self) -> int:
        return int(self.manifest.model["vocab_size"])

    @property
    def context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        limits = self.limits
        return min(limits.max_context, (limits.kv_pages - 1) * limits.page_size)

    def room(self) -> Room:
        speculation = Speculation() if self.limits.draft_depth else PLAIN
        return Room(self.context, tuple(self.manifest.model["eos_token_ids"]), speculation)

    @staticmethod
    def read(artifact: str | Path, name: str | None = None) -> ModelInfo:
        """Of the engine in `artifact`; name: to serve it under, instead of its own. Raises `EngineError`."""
        manifest = read_manifest(artifact)
        path = Path(artifact) / MANIFEST_NAME
        fingerprint = blake3(path.read_bytes()).hexdigest()
        return ModelInfo(name or manifest.name, manifest, fingerprint, int(path.stat().st_mtime))


@dataclass(frozen=True)
class Services:
    """engine: what endpoints generate with; client: the same engine's process, for its health. defaults: sampling where
    a request says nothing."""

    model: ModelInfo
    tokenizer: Tokenizer
    engine: Engine
    client: EngineClient
    chat: ChatRunner
    metrics: Metrics
    defaults: SamplingParams

    def check_model(self, name: str | None) -> None:
        """`BadRequest` 404 unless `name` is the model that is served."""
        if name is not None and name != self.model.name:
            message = f"model: {name[:128]!r} is not served here, {self.model.name!r} is"
            raise BadRequest(message, "model", 404, "model_not_found")
