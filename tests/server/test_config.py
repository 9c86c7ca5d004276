"""Settings of `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine_runtime.cli import main
from engine_runtime.server.config import KEY_VARIABLE, ServeConfig


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert main(["serve", "ARTIFACT", "--print-config", *options]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_defaults_listen_on_this_machine_only(capsys) -> None:
    config = printed(capsys)
    assert config["host"] == "127.0.0.1" and config["port"] == 8000 and "api_key" not in config


def test_file_then_command_line(capsys, tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nmax_queue: 7\nshutdown_timeout: 3\n")
    config = printed(capsys, "--config", str(file), "--port", "9001", "--model-name", "kimi")
    assert (config["port"], config["max_queue"], config["shutdown_timeout"]) == (9001, 7, 3.0)
    assert config["model_name"] == "kimi"
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(config))
    assert printed(capsys, "--config", str(again)) == config


def test_keys_are_never_printed(capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api_key: [secret-one, secret-two]\n")
    monkeypatch.setenv(KEY_VARIABLE, "secret-three")
    for options in (["--config", str(file)], ["--api-key", "secret-four"], []):
        assert main(["serve", "ARTIFACT", "--print-config", *options]) == 0
        shown = capsys.readouterr().out
        assert "secret" not in shown and "not shown" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "prot: no such setting"),
        ("port: many", "port"),
        ("port: 70000", "port: expected 0 to 65535"),
        ("api_key: 5", "api_key"),
        ("api_key: ['']", "api_key: expected a text"),
        ("- port", "expected a mapping"),
        ("port: [", "is not YAML at line"),
        ("temperature: 3", "temperature: expected 0 to 2"),
        ("log_level: loud", "log_level"),
        ("max_queue: -1", "max_queue: expected at least 0"),
    ],
)
def test_wrong_settings_are_one_sentence(capsys, tmp_path, text, message) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert main(["serve", "ARTIFACT", "--config", str(file), "--print-config"]) == 1
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_a_missing_file_is_told(capsys) -> None:
    assert main(["serve", "ARTIFACT", "--config", "/no/such/file", "--print-config"]) == 1
    assert "/no/such/file: cannot be read" in capsys.readouterr().err


def test_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for name in ServeConfig.__dataclass_fields__:
        assert f"`{name}`" in text, name
