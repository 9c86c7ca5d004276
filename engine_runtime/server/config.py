"""Settings of `serve`: defaults, a YAML file, the command line, in this order.

The command line asks for the options whatever the command is, so the server's libraries are imported on demand.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

KEY_VARIABLE = "K2_API_KEY"


class ConfigError(ValueError):
    """A setting is wrong; one sentence."""


def _setting(default: Any, text: str, metavar: str = "N", least: float = 0) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar, "least": least})


@dataclass(frozen=True)
class ServeConfig:
    """Every setting, named as on the command line with - for _. Times in seconds."""

    host: str = _setting("127.0.0.1", "address to listen on", "ADDRESS")
    port: int = _setting(8000, "port to listen on")
    api_key: tuple[str, ...] = _setting((), f"key that clients must send, may be repeated (or ${KEY_VARIABLE})", "KEY")
    model_name: str | None = _setting(None, "name to serve the model under; default: the engine's", "NAME")
    threads: int = _setting(1, "CPU threads a rank", least=1)
    max_queue: int = _setting(64, "requests that may wait for a slot; more get 429")
    max_body_bytes: int = _setting(16 << 20, "largest request body", least=1024)
    shutdown_timeout: float = _setting(30.0, "for running requests to end after SIGTERM", "SECONDS")
    stall_timeout: float = _setting(10.0, "silence of the engine after which /ready says stalled", "SECONDS", 0.1)
    kill_timeout: float = _setting(60.0, "silence of the engine after which it is restarted", "SECONDS", 0.1)
    temperature: float = _setting(1.0, "where a request gives none", "X")
    top_p: float = _setting(0.95, "where a request gives none", "X")
    log_level: str = _setting("info", "debug, info, warning or error", "LEVEL")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, least = getattr(self, setting.name), setting.metadata["least"]
            if isinstance(value, int | float) and value < least:
                raise ConfigError(f"{setting.name}: expected at least {least}, found {value}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, found {self.port}")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature: expected 0 to 2, found {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected above 0 and at most 1, found {self.top_p}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level: expected debug, info, warning or error, found {self.log_level!r}")
        if any(not key for key in self.api_key):
            raise ConfigError("api_key: expected a text, found an empty one")

    def to_yaml(self) -> str:
        """As a file that can be given to --config; keys are left out."""
        import yaml

        values = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name != "api_key"}
        hidden = f"# api_key: {len(self.api_key)} not shown\n" if self.api_key else ""
        return hidden + yaml.safe_dump(values, sort_keys=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings; options override it")
    parser.add_argument("--print-config", action="store_true", help="print the settings as YAML and end")
    for setting in fields(ServeConfig):
        kind = {"int": int, "float": float}.get(str(setting.type), str)
        repeated = {"action": "append"} if setting.name == "api_key" else {"type": kind}
        shown = "" if setting.default in (None, ()) else f" (default {setting.default})"
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            metavar=setting.metadata["metavar"],
            help=setting.metadata["help"] + shown,
            **repeated,  # type: ignore[arg-type]
        )


def read_config(args: argparse.Namespace) -> ServeConfig:
    """The settings of one command line. Raises `ConfigError`."""
    values = _read_file(args.config) if args.config is not None else {}
    config = ServeConfig(**values)
    if KEY_VARIABLE in os.environ and "api_key" not in values:
        config = replace(config, api_key=(os.environ[KEY_VARIABLE],))
    given = {setting.name: getattr(args, setting.name) for setting in fields(ServeConfig)}
    given = {name: value for name, value in given.items() if value is not None}
    if "api_key" in given:
        given["api_key"] = tuple(given["api_key"])
    return replace(config, **given)


def _read_file(name: str) -> dict[str, Any]:
    import msgspec
    import yaml

    try:
        value = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(f"{name}: is not YAML" + (f" at line {where.line + 1}" if where else "")) from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a mapping of settings, found {type(value).__name__}")
    known = [setting.name for setting in fields(ServeConfig)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name}: {key}: no such setting, known are {', '.join(known)}")
    try:
        config = msgspec.convert(value, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    return {key: getattr(config, key) for key in value}
