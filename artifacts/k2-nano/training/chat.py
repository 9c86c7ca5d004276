"""Conversations made from real documented functions, and the rendering of messages with the chat template."""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizer import CHECKPOINT

READ_TOOL = {
    "type": "function",
    "function": {
        "name": "read_symbol",
        "description": "Read one function of a source file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "symbol": {"type": "string"}},
            "required": ["path", "symbol"],
        },
    },
}
SYSTEM = (
    "You are K2-Nano, a small coding assistant. Answer with short, plain Python.",
    "You write Python functions. Keep to the signature and the description that the user gives.",
    "You are a careful engineer who reads code before answering questions about it.",
)
SYSTEM_SHARE = 0.6  # share of the conversations that open with a system message
MAX_SOURCE = 1600  # characters
KINDS = ("write", "write", "think", "think", "explain", "tool")


def _tojson(value: Any, separators: tuple[str, str] | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _tojson
    return environment.from_string((CHECKPOINT / "chat_template.jinja").read_text())


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    """Prompt text of messages; options are the template's inputs (tools, thinking, add_generation_prompt, ...)."""
    return _template().render(messages=messages, **options)


def functions(source: str) -> Iterator[tuple[ast.FunctionDef, str, str]]:
    """Yield (node, dedented source, first docstring line) of the documented functions of a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        text = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno])
        summary = (ast.get_docstring(node) or "").strip().split("\n")[0].strip()
        if 15 <= len(summary) <= 110 and 80 <= len(text) <= MAX_SOURCE:
            yield node, text, summary


def reasoning(node: ast.FunctionDef) -> str:
    """A short plan read off the syntax tree: arguments, the calls made, what is returned or raised."""
    arguments = [a.arg for a in node.args.args if a.arg not in ("self", "cls")]
    calls, raised, returned = [], [], []
    for item in ast.walk(node):
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name | ast.Attribute):
            calls.append(ast.unparse(item.func))
        elif isinstance(item, ast.Raise) and isinstance(item.exc, ast.Call):
            raised.append(ast.unparse(item.exc.func))
        elif isinstance(item, ast.Return) and item.value is not None:
            returned.append(ast.unparse(item.value))
    plan = f"The function takes {', '.join(f'`{a}`' for a in arguments) or 'no arguments'}."
    calls = [c for c in dict.fromkeys(calls) if len(c) < 40 and c not in raised][:3]
    if calls:
        plan += f" It uses {', '.join(f'`{c}`' for c in calls)}."
    if raised and len(raised[0]) < 40:
        plan += f" It raises `{raised[0]}`."
    if returned and len(returned[0]) < 60:
        plan += f" It returns `{returned[0]}`."
    return plan


def conversation(node: ast.FunctionDef, text: str, summary: str, path: str, kind: str) -> dict[str, Any]:
    """{"messages", "tools", "thinking"}; the last message is the assistant's answer.

    kind: write (code, thinking off), think (code after a plan), explain (summary of given code), tool (a call, its
    result and a closing sentence).
    """
    signature = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
    code = f"```python\n{text}\n```"
    ask = {"role": "user", "content": f"Write a Python function `{signature}`: {summary}"}
    if kind == "write":
        return {"messages": [ask, {"role": "assistant", "content": code}], "tools": None, "thinking": False}
    if kind == "think":
        answer = {"role": "assistant", "reasoning_content": reasoning(node), "content": code}
        return {"messages": [ask, answer], "tools": None, "thinking": True}
    if kind == "explain":
        bare_node = copy.copy(node)
        bare_node.body = node.body[1:] or [ast.Pass()]
        bare = ast.unparse(bare_node)
        question = {"role": "user", "content": f"What does this function do?\n```python\n{bare}\n```"}
        return {
            "messages": [question, {"role": "assistant", "content": summary}],
            "tools": None,
            "thinking": False,
        }
    call_id = "functions.read_symbol:0"
    arguments = _tojson({"path": path, "symbol": node.name})
    messages = [
        {"role": "user", "content": f"Look at `{node.name}` in {path} and tell me what it does."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I should read `{node.name}` in {path} first.",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": "read_symbol", "arguments": arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_id, "content": text},
        {"role": "assistant", "content": f"`{node.name}`: {summary}"},
    ]
    return {"messages": messages, "tools": [READ_TOOL], "thinking": True}


def render_training(chat: dict[str, Any]) -> str:
    """The whole conversation, reasoning kept, as one training text (without the closing [EOS])."""
    options = {"thinking": chat["thinking"], "preserve_thinking": True}
    return render(chat["messages"], tools=chat["tools"], **options)


def conversations(source: str, path: str, rng: random.Random, most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield up to `most` (kind, conversation) pairs made from the functions of one module."""
    found = list(functions(source))
    for node, text, summary in rng.sample(found, min(most, len(found))):
        kind = rng.choice(KINDS)
        talk = conversation(node, text, summary, path, kind)
        if rng.random() < SYSTEM_SHARE:
            talk["messages"].insert(0, {"role": "system", "content": rng.choice(SYSTEM)})
        yield kind, talk
