"""Reading config files: typed getters whose errors name the key, and the quantization check."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.errors import CheckpointError

GROUP_SIZE = 32  # of the INT4 scales: the packed layout holds 32 columns a block
INT4 = "INT4 weights in compressed-tensors' pack-quantized format, symmetric, group size 32"


class Section:
    """One JSON object of a config file. Getters raise `CheckpointError` naming file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def where(self, key: str) -> str:
        return f"{self.path}: {self.prefix}{key}"

    def get(self, key: str) -> Any:
        """The value, or None where the key is absent or null."""
        return self.values.get(key)

    def section(self, key: str) -> Section | None:
        """The object under `key`; None where absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where(key)} is {value!r}: expected an object")
        return Section(self.path, value, f"{self.prefix}{key}.")

    def number(self, key: str) -> float:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.where(key)} is {value!r}: expected a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            raise CheckpointError(f"{self.where(key)} is {value!r}: expected a number above 0")
        return value

    def integer(self, key: str, least: int = 1) -> int:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise CheckpointError(f"{self.where(key)} is {value!r}: expected a whole number, {least} or more")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key, least=0)

    def boolean(self, key: str) -> bool:
        value = self._required(key)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where(key)} is {value!r}: expected true or false")
        return value

    def refuse_unless(self, key: str, *supported: Any) -> None:
        """Raise unless the value is absent, null or one of `supported`."""
        value = self.get(key)
        if value is not None and value not in supported:
            expected = " or ".join(json.dumps(item) for item in supported) or "no value"
            raise CheckpointError(f"{self.where(key)} is {json.dumps(value)}: this engine supports only {expected}")

    def _required(self, key: str) -> Any:
        if self.values.get(key) is None:
            raise CheckpointError(f"{self.where(key)} is missing: the engine takes every size from this file")
        return self.values[key]


def load_json(path: Path, what: str) -> Section:
    """The object in the JSON file `path`; `what` says in an error what the file is for."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}: expected a JSON object")
    return Section(path, value)


def int4_group_size(quantization: Section) -> int:
    """Columns per scale of a quantization_config; raises for everything but `INT4`."""
    method = quantization.get("quant_method")
    if method != "compressed-tensors":
        kind = "FP8" if method == "fp8" else repr(method)
        raise CheckpointError(
            f"{quantization.where('quant_method')} is {kind}: this engine needs {INT4}, "
            "as K2-Thinking, K2.5 and K2.6 are published"
        )
    quantization.refuse_unless("format", "pack-quantized")
    quantization.refuse_unless("quantization_status", "compressed")
    quantization.refuse_unless("kv_cache_scheme")
    groups = quantization.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise CheckpointError(f"{quantization.where('config_groups')}: expected one group, with {INT4}")
    group = groups.section(next(iter(groups.values)))
    weights = group.section("weights") if group else None
    if group is None or weights is None:
        raise CheckpointError(f"{quantization.where('config_groups')} has no weights: expected {INT4}")
    group.refuse_unless("input_activations")
    group.refuse_unless("output_activations")
    group.refuse_unless("format", "pack-quantized")
    weights.refuse_unless("actorder")
    weights.refuse_unless("dynamic", False)
    for key, expected in (("num_bits", 4), ("type", "int"), ("symmetric", True), ("strategy", "group")):
        if weights.get(key) != expected:
            raise CheckpointError(f"{weights.where(key)} is {json.dumps(weights.get(key))}: this engine needs {INT4}")
    size = weights.integer("group_size")
    if size != GROUP_SIZE:
        raise CheckpointError(f"{weights.where('group_size')} is {size}: this engine needs {INT4}")
    return size
