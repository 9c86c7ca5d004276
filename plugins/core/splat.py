"""Synthetic weights for engines without a weights file: deterministic and of sane magnitude."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from plugins.core.plugin import Launch
from plugins.core.spec import DTYPES, TensorSpec, f32_to_bf16

INT4_TILE = 576  # bytes of a tile of int4_marlin_gemm: 512 of 32 x 32 weights, then 32 bfloat16 scales
INT4_NIBBLES = 512
_TILES, _VECTORS, _MATRICES = 0, {"float32": 1, "bfloat16": 2}, {"float32": 3, "bfloat16": 4}  # as in splat.cu
_THREADS, _MOST_BLOCKS = 256, 4096


def hash32(counter: np.ndarray, seed: int) -> np.ndarray:
    """uint32 hash of uint32 counters: "lowbias32" of C. Wellons, "Prospecting for hash functions"."""
    value = counter ^ np.uint32(seed)
    value = (value ^ (value >> np.uint32(16))) * np.uint32(0x7FEB352D)
    value = (value ^ (value >> np.uint32(15))) * np.uint32(0x846CA68B)
    return value ^ (value >> np.uint32(16))


def splat(name: str, spec: TensorSpec) -> np.ndarray:
    """Weight `name` in storage dtype: the same bytes in every process, different for different names.

    Floating-point vectors (norms, biases) are within 10 % of 1; matrices are uniform with standard deviation
    1 / sqrt(last axis), so that activations keep their scale. uint8 tensors are the INT4 tiles
    [.., K/32, 576] of int4_marlin_gemm: random nibbles, scales for weights of about the same deviation.
    """
    kind, scale = _kind(name, spec)
    bits = hash32(np.arange(spec.numel, dtype=np.uint32), _seed(name))
    if kind == _TILES:
        tiles = (bits & np.uint32(0xFF)).astype(np.uint8).reshape(-1, INT4_TILE)
        factor = _unit(bits.reshape(-1, INT4_TILE)[:, INT4_NIBBLES::2]) * np.float32(0.1) + np.float32(1)
        tiles[:, INT4_NIBBLES:] = f32_to_bf16(factor * scale).view(np.uint8)
        return tiles.reshape(spec.shape)
    values = _unit(bits).reshape(spec.shape)
    values = values * np.float32(0.1) + np.float32(1) if kind in _VECTORS.values() else values * scale
    return f32_to_bf16(values) if spec.dtype == "bfloat16" else values.astype(DTYPES[spec.dtype][1])


def splat_launch(name: str, spec: TensorSpec) -> Launch:
    """The kernel that writes the same bytes at the address it is given; all weights share one image."""
    kind, scale = _kind(name, spec)
    scalars = (spec.numel, _seed(name), kind, int(scale.view(np.uint32)))
    blocks = min(-(-spec.numel // _THREADS), _MOST_BLOCKS)
    return Launch(
        "core/device/splat.cu", "splat", (), (max(blocks, 1), 1, 1), (_THREADS, 1, 1), pdl=False, scalars=scalars
    )


def _kind(name: str, spec: TensorSpec) -> tuple[int, np.float32]:
    """Number of the distribution in splat.cu, and its scale."""
    if spec.dtype == "uint8" and len(spec.shape) > 1 and spec.shape[-1] == INT4_TILE:
        return _TILES, np.float32((3 / (32 * spec.shape[-2])) ** 0.5 / 8)  # a nibble is -8 .. 7
    if spec.dtype not in _VECTORS:
        raise ValueError(f"weight {name}: no synthetic values for {spec}: expected floats or INT4 tiles")
    if len(spec.shape) < 2:
        return _VECTORS[spec.dtype], np.float32(1)
    return _MATRICES[spec.dtype], np.float32((3 / spec.shape[-1]) ** 0.5)


def _seed(name: str) -> int:
    return crc32(name.encode())


def _unit(bits: np.ndarray) -> np.ndarray:
    """uint32 -> float32 uniform in [-1, 1)."""
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
