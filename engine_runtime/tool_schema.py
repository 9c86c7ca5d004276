"""Tool declarations as TypeScript text, the form Kimi K2.5 and K2.6 were trained on (`tools_ts_str`).

The layout follows Moonshot's `tool_declaration_ts.py` byte for byte: required parameters first, each group
sorted by name; comments above a parameter for description, constraints and default; `$defs` become
interfaces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INDENT = "  "
_CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class ToolSchemaError(Exception):
    """A tool's parameter schema has no TypeScript form; the message names the tool and the place."""


def declare_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """TypeScript text for tools in OpenAI form, `{"type": "function", "function": {...}}`.

    Tools of another type are left out; "" where nothing is left. ToolSchemaError for a schema that the form
    cannot express (a reference outside `$defs`, a node without type, ...).
    """
    functions = []
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not function:
            continue
        try:
            functions.append(_Function().declare(function))
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ToolSchemaError(f"tool {function.get('name')!r} has no TypeScript form: {error!r}") from None
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


def _comment(description: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in description.split("\n"))


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind):
            raise ValueError(f"enum of type {kind}")
        kind = next((name for name in kind if name != "null"), "null")
    python_type = _ENUM_TYPES.get(kind, object) if isinstance(kind, str) else object
    for value in schema["enum"]:
        if value is not None and not isinstance(value, python_type):
            raise ValueError(f"enum value {value!r} is not of type {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])


class _Function:
    """Writes one function; collects the `$defs` and self references it meets on the way."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.has_self_reference = False

    def declare(self, function: Mapping[str, Any]) -> str:
        name = function.get("name", "function")
        parameters = function.get("parameters") or {}
        signature = self.object_type(parameters, "")
        parts = []
        if self.has_self_reference:
            signature = "parameters"
            fields = ",\n".join(self.fields(parameters, sort=False, indent=_INDENT))
            parts.append("interface parameters {" + (f"\n{fields}\n" if fields else "") + "}")
        for definition, schema in list(self.definitions.items()):
            text = self.type_text(schema, "")
            description = schema.get("description", "")
            parts.append((_comment(description, "") + "\n" if description else "") + f"interface {definition} {text}")
        if function.get("description"):
            parts.append(_comment(function["description"], ""))
        parts.append(f"type {name} = (_: {signature}) => any;")
        return "\n".join(parts)

    def comments(self, schema: Any, indent: str) -> str:
        """Comment lines above a type: description, then constraints sorted by name."""
        if not isinstance(schema, Mapping):
            return ""
        lines = []
        if schema.get("description"):
            lines.append(_comment(schema["description"], indent))
        plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
        kind = schema.get("type")
        known = _CONSTRAINTS.get(kind, ()) if plain and isinstance(kind, str) else ()
        limits = [f"{key}: {schema[key]}" for key in known if key in schema]
        if limits:
            lines.append(f"{indent}// " + ", ".join(limits))
        return "".join(line + "\n" for line in lines)

    def type_text(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self.reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type_text(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        if "type" not in schema:
            if schema:
                raise ValueError(f"a schema without a type: {dict(schema)}")
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(_UNION_TYPES[name] for name in kind)
        if kind == "object":
            return self.object_type(schema, indent)
        if kind == "array":
            return self.array_type(schema.get("items") or {}, indent)
        return "number" if kind == "integer" else str(kind)

    def reference(self, target: str) -> str:
        if target == "#":
            self.has_self_reference = True
            return "parameters"
        name = target.rsplit("/", 1)[-1]
        if not target.startswith("#/$defs/") or name not in self.definitions:
            raise ValueError(f"the reference {target} is not one of $defs")
        return name

    def array_type(self, items: Any, indent: str) -> str:
        inner = indent + _INDENT
        comments = self.comments(items, inner)
        if not comments:
            return f"Array<{self.type_text(items, indent)}>"
        return f"Array<\n{comments}{inner}{self.type_text(items, inner)}\n{indent}>"

    def object_type(self, schema: Mapping[str, Any], indent: str) -> str:
        self.definitions.update(schema.get("$defs") or {})
        inner = indent + _INDENT
        extra = schema.get("additionalProperties")
        if isinstance(extra, Mapping):
            last = [f"{inner}[k: string]: {self.type_text(extra, inner)}"]
        elif extra is not None:
            last = [f"{inner}[k: string]: " + {True: "any", False: "never"}[extra]]
        else:
            last = []
        fields = self.fields(schema, sort=True, indent=inner) + last
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"

    def fields(self, schema: Mapping[str, Any], sort: bool, indent: str) -> list[str]:
        required = set(schema.get("required", []))
        # written in the order of the schema, on which `$defs` and references depend, and sorted afterwards
        texts = {
            name: self.field(name, item, name in required, indent)
            for name, item in schema.get("properties", {}).items()
        }
        names = sorted(texts, key=lambda name: (name not in required, name)) if sort else list(texts)
        return [texts[name] for name in names]

    def field(self, name: str, schema: Any, required: bool, indent: str) -> str:
        text = self.comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if isinstance(default, bool | int | float):
            text += f"{indent}// Default: {default!r}\n"
        elif default is not None:
            text += f"{indent}// Default: {json.dumps(default, ensure_ascii=False)}\n"
        return f"{text}{indent}{name}{'' if required else '?'}: {self.type_text(schema, indent)}"
