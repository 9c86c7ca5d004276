"""Keys, limits, errors of every kind, ids, logs: what every request passes."""

from __future__ import annotations

import contextlib
import json
import logging
import socket

import httpx
import pytest

from engine_runtime.server.gate import OPEN_PATHS
from engine_runtime.server.logs import JSONLines, request_id
from tests.server.harness import live_server

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def locked():
    with live_server(api_keys=("first-key", "second-key"), max_body_bytes=2000) as live:
        yield live


def test_everything_but_health_needs_a_key(locked) -> None:
    paths = set(locked.client.get("/openapi.json", headers={"authorization": "Bearer first-key"}).json()["paths"])
    assert {CHAT, "/metrics", "/tokenize", "/version", "/health"} <= paths
    for path in sorted(paths | {"/openapi.json", "/nothing"}):
        response = locked.client.get(path)
        if path in OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert response.status_code == 401, path
            assert response.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer second-key"}, 200),
        ({"x-api-key": "second-key"}, 200),
        ({"authorization": "Bearer first-ke"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
def test_keys(locked, headers, status) -> None:
    assert locked.post(CHAT, HI, headers=headers).status_code == status


def test_bodies_that_are_too_large_are_413(locked) -> None:
    headers = {"authorization": "Bearer first-key"}
    large = {"messages": [{"role": "user", "content": "x" * 3000}]}
    declared = locked.post(CHAT, large, headers=headers)
    pieces = (json.dumps(large).encode()[i : i + 100] for i in range(0, 4000, 100))
    json_headers = {**headers, "content-type": "application/json"}
    chunked = locked.client.post(CHAT, content=pieces, headers=json_headers)
    for response in (declared, chunked):
        assert response.status_code == 413 and "2000" in response.json()["error"]["message"]
    assert locked.post(CHAT, HI, headers=headers).status_code == 200


def test_headers_that_are_too_large_are_refused(locked) -> None:
    with contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # closed before all was sent
        response = httpx.get(f"{locked.url}/health", headers={"x-large": "x" * 200_000})
        assert response.status_code in (400, 431)
    assert locked.client.get("/health").status_code == 200


def test_unknown_paths_and_methods_have_the_envelope(live) -> None:
    for method, path, status in [("GET", "/nope", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)]:
        response = live.client.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]
    assert live.client.get("/v1/messages/nope").json()["type"] == "error"  # Anthropic's form


@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "null", "5", "\xff", "[" * 100_000, '{"messages": "\\ud800"}'])
def test_bodies_that_are_no_json_objects_are_400(live, body) -> None:
    data = body.encode("latin-1")
    response = live.client.post(CHAT, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_content_types_are_refused(live) -> None:
    response = live.client.post(CHAT, content=json.dumps(HI).encode(), headers={"content-type": "text/plain"})
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


def test_request_ids_come_back(live) -> None:
    assert live.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for unfit in ("x" * 500, "tab\there"):
        found = live.client.get("/health", headers={"x-request-id": unfit}).headers["x-request-id"]
        assert found != unfit and len(found) == 32


def test_errors_carry_the_request_id_into_the_log(live, caplog) -> None:
    live.engine.failure = RuntimeError("a fault")
    with caplog.at_level(logging.INFO):
        response = live.post(CHAT, HI, headers={"x-request-id": "find-me"})
    assert response.status_code == 500 and response.headers["x-request-id"] == "find-me"
    assert "a fault" in caplog.text and "a fault" not in response.text


def test_log_lines_are_json_and_cannot_be_forged() -> None:
    token = request_id.set("id-1")
    try:
        record = logging.LogRecord("n", logging.INFO, "f", 1, "x\n{} \u2028\x1b", (), None)
        record.fields = {"status": 200}
        line = JSONLines().format(record)
    finally:
        request_id.reset(token)
    assert "\n" not in line and line.isascii() and "\x1b" not in line
    entry = json.loads(line)
    assert entry["message"] == "x\n{} \u2028\x1b" and entry["request_id"] == "id-1" and entry["status"] == 200


@pytest.mark.parametrize("state", ["loading", "stalled", "failed", "draining"])
def test_health_tells_the_truth(live, state) -> None:
    live.engine.state = state
    for path in ("/health", "/ready", "/health/ready"):
        response = live.client.get(path)
        assert response.status_code == 503
        assert response.json()["state"] == state and state in response.json()["reason"]
        assert response.json()["progress"] == 0.5 and response.json()["last_step_age_seconds"] == 0.01
    assert live.client.get("/health/live").status_code == 200
    live.engine.state = "ready"
    assert live.client.get("/ready").json()["state"] == "ready"


def test_version_has_the_engines_fingerprint(live) -> None:
    version = live.client.get("/version").json()
    assert version["engine"]["fingerprint"] == "f" * 64 and version["engine"]["tp"] == 1


def test_no_external_assets(live) -> None:
    assert live.client.get("/docs").status_code == 404 and live.client.get("/redoc").status_code == 404


def test_a_body_that_does_not_come_ends_with_408(live, monkeypatch) -> None:
    monkeypatch.setattr("engine_runtime.server.gate.BODY_SECONDS", 0.2)
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        slow.sendall(b"content-length: 100\r\n\r\n{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_headers_that_do_not_come_end_the_connection(live, monkeypatch, start) -> None:
    """On a new connection and on one that has served before."""
    monkeypatch.setattr("engine_runtime.server.listener.HEADER_SECONDS", 0.2)
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        if start:
            slow.sendall(start)
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(4096):
                pass
