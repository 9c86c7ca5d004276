"""Agents' own JavaScript clients: openai-node, and the Vercel AI SDK that OpenCode uses."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import MODEL, ScriptedEngine, live_server
from tests.server.vocabulary import call, section, tokenizer

END = "<|im_end|>"
NODE = Path(__file__).parent / "node"
if shutil.which("node") is None:
    pytest.skip("node is not installed", allow_module_level=True)
if not (NODE / "node_modules").exists():
    pytest.skip("the packages of tests/server/node are not installed: `make setup` does it", allow_module_level=True)


def run(script: str, engine: ScriptedEngine, *arguments: str) -> Any:
    with live_server(engine) as live:
        command = ["node", str(NODE / script), f"{live.url}/v1", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("group", [1, 7])
def test_openai_node(group: int) -> None:
    arguments = '{"path": "a\\nb"}'
    engine = ScriptedEngine(
        scripts=[
            "hm</think>Hello" + END,
            "I must</think>reading" + section(call("functions.read-file.v2:0", arguments)) + END,
            "</think>it says text" + END,
            '</think>{"n": 3}' + END,
            "</think>hi there" + END,
        ],
        group=group,
    )
    assert run("openai.mjs", engine) == {
        "plain": {"content": "Hello", "reasoning": "hm"},
        "tools": {
            "reasoning": "I must",
            "content": "reading",
            "calls": [["functions.read-file.v2:0", "read-file.v2", arguments]],
            "finish": "tool_calls",
            "usage": True,
        },
        "after": "it says text",
        "parsed": {"n": 3},
        "response": "hi there",
        "status": "completed",
        "error": [404, "model_not_found", "NotFoundError"],
    }
    rendered = tokenizer().decode(engine.requests[2].prompt)
    assert "## Return of functions.read-file.v2:0\ntext" in rendered
    constraint = engine.requests[3].constraint
    assert constraint is not None and "integer" in (constraint.grammar or "")


def test_vercel_ai_sdk() -> None:
    scripts = [
        "I will</think>" + section(call("functions.read:0", '{"path": "é.txt"}')) + END,
        "</think>Done." + END,
        '</think>{"n": 4}' + END,
    ]
    engine = ScriptedEngine(scripts, group=3)
    assert run("ai.mjs", engine, MODEL.name) == {
        "seen": ["é.txt"],
        "kinds": ["reasoning-delta", "text-delta", "tool-call", "tool-result"],
        "reasoning": "I will",
        "calls": [["functions.read:0", "read"]],
        "finish": ["tool-calls", "stop"],
        "text": "Done.",
        "tokens": True,
        "object": {"n": 4},
    }
    second = tokenizer().decode(engine.requests[1].prompt)
    # the reasoning came back inside the tool loop, and the result answers the call
    assert "<think>I will</think><|tool_calls_section_begin|>" in second
    assert "## Return of functions.read:0\n" in second
