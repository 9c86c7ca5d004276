"""Shape and dtype of a tensor, without its data, and the dtype table used in every file of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

# name -> (bytes per element, numpy storage dtype, safetensors name). numpy has no bfloat16: it is carried as uint16.
DTYPES: dict[str, tuple[int, type[np.generic], str]] = {
    "float32": (4, np.float32, "F32"),
    "bfloat16": (2, np.uint16, "BF16"),
    "int32": (4, np.int32, "I32"),
    "uint32": (4, np.uint32, "U32"),
    "int64": (8, np.int64, "I64"),
    "uint8": (1, np.uint8, "U8"),
}


@dataclass(frozen=True)
class TensorSpec:
    """Static shape and dtype (a key of `DTYPES`) of one dense, row-major tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {sorted(DTYPES)}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype][0]

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}

    @staticmethod
    def from_json(value: dict[str, Any]) -> TensorSpec:
        return TensorSpec(tuple(value["shape"]), value["dtype"])

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """uint16 bfloat16 bits -> float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bfloat16 bits, round to nearest even (no NaN payloads kept)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
