"""CUDA tactic of `draft_tokens`: a thread an id."""

from __future__ import annotations

from collections.abc import Sequence

from plugins.core.cuda import ARCHS
from plugins.core.plugin import Attrs, Launch, Tactic
from plugins.core.spec import TensorSpec

_THREADS = 128


def _launches(attrs: Attrs, inputs: Sequence[TensorSpec | None], arch: str) -> tuple[Launch, ...]:
    requests = inputs[0]
    assert requests is not None
    blocks, size = requests.shape[0], attrs["block_size"]
    constants = (("BLOCKS", blocks), ("BLOCK_SIZE", size), ("MASK_ID", attrs["mask_token_id"]))
    grid = (-(-blocks * size // _THREADS), 1, 1)
    return (Launch("draft_tokens/tokens.cu", "tokens", constants, grid, (_THREADS, 1, 1)),)


TACTICS = (Tactic("threads", ARCHS, launches=_launches),)
