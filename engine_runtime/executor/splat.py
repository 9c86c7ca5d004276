"""Synthetic weights for engines without a weights file: deterministic and of sane magnitude."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from plugins.core.spec import DTYPES, TensorSpec, f32_to_bf16

INT4_TILE = 576  # bytes of a tile of int4_marlin_gemm: 512 of 32 x 32 weights, then 32 bfloat16 scales
INT4_NIBBLES = 512


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
    bits = hash32(np.arange(spec.numel, dtype=np.uint32), crc32(name.encode()))
    storage = DTYPES[spec.dtype][1]
    if spec.dtype == "uint8" and len(spec.shape) > 1 and spec.shape[-1] == INT4_TILE:
        tiles = (bits & np.uint32(0xFF)).astype(np.uint8).reshape(-1, INT4_TILE)
        factor = _unit(bits.reshape(-1, INT4_TILE)[:, INT4_NIBBLES::2]) * np.float32(0.1) + np.float32(1)
        scale = np.float32((3 / (32 * spec.shape[-2])) ** 0.5 / 8)  # a nibble is -8 .. 7
        tiles[:, INT4_NIBBLES:] = f32_to_bf16(factor * scale).view(np.uint8)
        return tiles.reshape(spec.shape)
    if spec.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"weight {name}: no synthetic values for {spec}: expected floats or INT4 tiles")
    values = _unit(bits).reshape(spec.shape)
    if len(spec.shape) < 2:
        values = values * np.float32(0.1) + np.float32(1)
    else:
        values = values * np.float32((3 / spec.shape[-1]) ** 0.5)
    return f32_to_bf16(values) if spec.dtype == "bfloat16" else values.astype(storage)


def _unit(bits: np.ndarray) -> np.ndarray:
    """uint32 -> float32 uniform in [-1, 1)."""
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
