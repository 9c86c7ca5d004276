"""What a user may choose at build time, with defaults and their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.config import DraftConfig, ModelConfig
from builder.errors import BuildError
from plugins.core.state import Limits

ARCHS = ("cpu", "sm_120a", "sm_90a")
VERIFY_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_TREE_TOP_K = 64


@dataclass(frozen=True)
class BuildOptions:
    """Options of one build.

    tp: ranks. arch: "cpu", "sm_120a" or "sm_90a". activation_dtype: None takes float32 on the CPU (the dtype in which
    equality with the reference is tested) and bfloat16 on a GPU. kv_dtype: None takes the activation dtype.
    max_context: tokens of one request; None takes the model's limit on a GPU and at most 4096 on the CPU.
    kv_tokens: tokens in the KV pool over all requests; None takes max_requests x max_context, at most 262,144.
    mla_norm_eps: eps of q_a_layernorm and kv_a_layernorm. The Kimi reference code and transformers leave it at 1e-6
    whatever rms_norm_eps says; vLLM and SGLang use rms_norm_eps (1e-5). Default: the reference's 1e-6.
    tensorrt: also build TensorRT plans of every phase, beside the native ones. tactics: times of their segments, which
    decide what our kernels compute in them.
    draft_rope_amplitude: factor on the drafter's cos and sin. None takes the drafter's own `attention_factor`, else
    0.1 ln(factor) + 1, the value with which the public Kimi drafters were found to be accepted most.
    """

    tp: int = 1
    arch: str = "cpu"
    activation_dtype: str | None = None
    kv_dtype: str | None = None
    max_context: int | None = None
    max_requests: int = 4
    kv_tokens: int | None = None
    prefill_chunk: int | None = None
    page_size: int = 64
    verify_buckets: tuple[int, ...] = VERIFY_BUCKETS
    mla_norm_eps: float = 1e-6
    draft_rope_amplitude: float | None = None
    splat: bool = False
    tensorrt: bool = False
    tactics: Path | None = None

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise BuildError(f"--arch {self.arch}: expected one of {', '.join(ARCHS)}")
        if self.tp < 1:
            raise BuildError(f"--tp {self.tp}: expected a number of ranks, 1 or more")
        if self.tactics is not None and not self.tensorrt:
            raise BuildError("--tactics: it says what TensorRT computes: expected --tensorrt with it")
        rows = max(self.verify_buckets)
        if not 1 <= self.max_requests <= rows:
            raise BuildError(f"--max-requests {self.max_requests}: expected 1 to {rows}, the largest verify bucket")

    @property
    def activations(self) -> str:
        return self.activation_dtype or ("float32" if self.arch == "cpu" else "bfloat16")

    @property
    def kv(self) -> str:
        return self.kv_dtype or self.activations

    def limits(self, config: ModelConfig, draft: DraftConfig | None) -> Limits:
        """Engine limits for a model; raises `BuildError` where an option exceeds what the model can do."""
        most = config.max_position_embeddings
        context = self.max_context or (min(4096, most) if self.arch == "cpu" else most)
        if not 1 <= context <= most:
            raise BuildError(f"--max-context {context}: expected 1 to {most}, the model's max_position_embeddings")
        chunk = self.prefill_chunk or min(256 if self.arch == "cpu" else 4096, context)
        pages = -(-context // self.page_size)
        tokens = self.kv_tokens or min(self.max_requests * pages * self.page_size, max(262_144, context))
        kv_pages = -(-tokens // self.page_size) + 1  # page 0 takes the writes of padding rows
        if kv_pages - 1 < pages:
            raise BuildError(
                f"--kv-tokens {tokens}: expected at least --max-context {context}, or one request could never finish"
            )
        rows = max(self.verify_buckets)
        return Limits(
            max_requests=self.max_requests,
            max_rows=rows,
            prefill_chunk=chunk,
            max_context=context,
            page_size=self.page_size,
            kv_pages=kv_pages,
            draft_depth=0 if draft is None else draft.block_size - 1,
            tree_top_k=min(MAX_TREE_TOP_K, rows - 1, config.vocab_size // self.tp),
        )

    def amplitude(self, draft: DraftConfig) -> float:
        """The drafter's YaRN factor on cos and sin (see the class docstring)."""
        if self.draft_rope_amplitude is not None:
            return self.draft_rope_amplitude
        if draft.rope_attention_factor is not None:
            return draft.rope_attention_factor
        return draft.rope.default_attention_factor()
