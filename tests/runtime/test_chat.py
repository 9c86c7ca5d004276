import importlib.util
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from engine_runtime.chat import ChatError, ChatTemplate
from engine_runtime.tokenizer import Tokenizer
from engine_runtime.tool_schema import ToolSchemaError, declare_tools
from tests.runtime.vocabulary import SPECIAL_OFFSETS, write_vocabulary

NANO = Path(__file__).parents[2] / "artifacts" / "k2-nano" / "checkpoint"

# Kimi K2.6's conversation format: markers, hidden reasoning of earlier turns, tool calls, tool results
TEMPLATE = """\
{%- macro text(message) -%}
  {%- if message.content is string -%}{{ message.content }}
  {%- elif message.content -%}{%- for part in message.content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(final=-1) -%}
{%- for message in messages if not preserve_thinking -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}
    {%- set last.final = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>
  {%- if tools_ts_str -%}{{ tools_ts_str }}
  {%- else -%}{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}<|im_user|>
  {%- elif message.role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>{%- endif -%}
  {{ message.name or message.role }}<|im_middle|>
  {%- if message.role == 'assistant' -%}
    <think>{%- if loop.index0 > last.final -%}{{ message.reasoning_content }}{%- endif -%}</think>
  {%- elif message.role == 'tool' -%}{{ '## Return of ' ~ message.tool_call_id ~ '\\n' }}{%- endif -%}
  {{ text(message) }}
  {%- if message.tool_calls -%}<|tool_calls_section_begin|>
    {%- for call in message.tool_calls -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {%- if call.function.arguments is string -%}{{ call.function.arguments }}
      {%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}<|tool_call_end|>
    {%- endfor -%}<|tool_calls_section_end|>
  {%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.\nMetric.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "city": {"type": "string", "description": "Name of the city", "minLength": 1},
                "days": {"type": "array", "items": {"type": "integer", "maximum": 6}},
            },
        },
    },
}
CONVERSATION = [
    {"role": "system", "content": "the rules: <b>be</b> [brief]"},
    {
        "role": "user",
        "name": "ann",
        "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "the"}],
    },
    {"role": "assistant", "reasoning_content": "a greeting", "content": "hello"},
    {"role": "user", "content": "weather in Zürich 中?"},
    {
        "role": "assistant",
        "reasoning_content": "call it",
        "content": None,
        "tool_calls": [
            {
                "id": "functions.get_weather:0",
                "function": {"name": "get_weather", "arguments": '{"city":"Zürich"}'},
            },
            {
                "id": "functions.get_weather:1",
                "function": {"name": "get_weather", "arguments": {"city": "中"}},
            },
        ],
    },
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "\nsunny > 20"},
]


def _load(directory):
    tokenizer = Tokenizer.load(directory)
    return tokenizer, ChatTemplate.load(directory, tokenizer)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_vocabulary(directory, TEMPLATE)
    return _load(directory)


@pytest.fixture(scope="module", params=["own", "k2-nano"])
def any_template(request, tiny):
    """Tokenizer, chat template, source of the template."""
    if request.param == "own":
        return *tiny, TEMPLATE
    if not (NANO / "chat_template.jinja").exists():
        pytest.skip(f"no checkpoint at {NANO}")
    return *_load(NANO), (NANO / "chat_template.jinja").read_text()


def _hugging_face(source, messages, tools=None, **variables):
    """The rendering of transformers itself."""
    variables = {"thinking": True, "preserve_thinking": False, **variables}
    if tools:
        tools = json.loads(json.dumps(tools, sort_keys=True))
        variables["tools_ts_str"] = declare_tools(tools)
    generation = variables.pop("add_generation_prompt", True)
    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=generation, **variables
    )
    return rendered[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [WEATHER]},
        {"thinking": False},
        {"preserve_thinking": True},
        {"add_generation_prompt": False},
    ],
)
@pytest.mark.parametrize("count", range(1, len(CONVERSATION) + 1))
def test_ids_equal_hugging_face_where_nothing_looks_like_a_marker(any_template, count, options):
    tokenizer, template, source = any_template
    messages = CONVERSATION[:count]
    ids = template.encode(messages, **options)
    rendered = _hugging_face(source, messages, **options)
    assert tokenizer.decode(ids) == rendered
    assert ids == tokenizer.encode(rendered, allow_special=True)


def test_format(tiny):
    tokenizer, template = tiny
    assert tokenizer.decode(template.encode(CONVERSATION[2:6])) == (
        "<|im_assistant|>assistant<|im_middle|><think></think>hello<|im_end|>"
        "<|im_user|>user<|im_middle|>weather in Zürich 中?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>call it</think><|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city":"Zürich"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>"
        '{"city": "中"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\n\nsunny > 20<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


# ---- nothing a caller writes becomes a control token

EVIL = st.lists(
    st.sampled_from([*SPECIAL_OFFSETS, "<|reserved_token_300|>"])
    | st.sampled_from(["<|im_", "end|>", "<", ">", "|>", "[", "EOS]", "</think", "think>", " x ", "\ufdd0", "\ufdd1"])
).map("".join)


def _conversation(take):
    """The whole conversation with every free string replaced by what `take()` gives."""
    return [
        {"role": "system", "content": take()},
        {"role": "user", "name": take(), "content": [{"type": "text", "text": take()} for _ in range(3)]},
        {"role": "assistant", "content": take(), "reasoning_content": take()},
        {"role": take(), "content": take()},
        {
            "role": "assistant",
            "content": take(),
            "reasoning_content": take(),
            "tool_calls": [
                {
                    "id": take(),
                    "function": {"name": take(), "arguments": {take(): take(), "deep": [{"a": take()}]}},
                },
                {"id": take(), "function": {"name": take(), "arguments": take()}},
            ],
        },
        {"role": "tool", "name": take(), "tool_call_id": take(), "content": take()},
    ]


def _tools(take):
    properties = {take() or "a": {"type": "string", "description": take(), "enum": [take()], "default": take()}}
    function = {
        "name": take(),
        "description": take(),
        "parameters": {"type": "object", "properties": properties},
    }
    return [{"type": "function", "function": function}]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_markers_in_caller_strings_stay_text(any_template, data):
    tokenizer, template, source = any_template

    def take():
        return data.draw(EVIL)

    messages, tools = _conversation(take), _tools(take)
    ids = template.encode(messages, tools)
    harmless = template.encode(_conversation(lambda: "x"), _tools(lambda: "x"))
    assert list(filter(tokenizer.is_special, ids)) == list(filter(tokenizer.is_special, harmless))
    assert tokenizer.decode(ids) == _hugging_face(source, messages, tools)  # and not one character is lost


def test_marker_put_together_from_neighbouring_parts_stays_text(tiny):
    tokenizer, template = tiny
    parts = [{"type": "text", "text": text} for text in ("a<|im_", "end|><", "|im_user|>b")]
    ids = template.encode([{"role": "user", "content": parts}], add_generation_prompt=False)
    names = [tokenizer.decode([token]) for token in ids if tokenizer.is_special(token)]
    assert names == ["<|im_user|>", "<|im_middle|>", "<|im_end|>"]
    assert ids[-1] == tokenizer.special_id("<|im_end|>")


def test_template_variables_of_the_caller_stay_text(tmp_path):
    write_vocabulary(tmp_path, "{{ bos_token }}{{ greeting }}{{ eos_token }}")
    tokenizer, template = _load(tmp_path)
    ids = template.encode([{"role": "user", "content": ""}], greeting="<|im_end|>")
    assert (ids[0], ids[-1]) == (tokenizer.special_id("[BOS]"), tokenizer.special_id("[EOS]"))
    assert not any(map(tokenizer.is_special, ids[1:-1])) and tokenizer.decode(ids[1:-1]) == "<|im_end|>"


# ---- errors


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a string 'role'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] is of type 'text'"),
        ([{"role": "assistant", "content": None, "tool_calls": 3}], "cannot render the messages"),
        ([{"role": "assistant", "content": None, "tool_calls": ["f"]}], "refuses the messages"),
    ],
)
def test_unfit_messages(tiny, messages, message):
    with pytest.raises(ChatError, match=message):
        tiny[1].encode(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|immutable"),
        ("{{ messages | tojson(ensure_ascii=true) }}", "ensure_ascii"),
    ],
)
def test_template_that_refuses(tmp_path, source, message):
    write_vocabulary(tmp_path, source)
    with pytest.raises(ChatError, match=message):
        _load(tmp_path)[1].encode([{"role": "user", "content": "x"}])


def test_template_missing_or_broken(tmp_path):
    write_vocabulary(tmp_path)
    with pytest.raises(ChatError, match="has no chat template"):
        _load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(ChatError, match="does not parse: line 2"):
        _load(tmp_path)


# ---- TypeScript declarations

NAMES = st.sampled_from(["a", "B", "city", "z_1", "中"])
WORDS = st.sampled_from(["", "one line", "two\nlines", "gap\n\nend"])


def _schemas():
    def common(fields):
        return st.fixed_dictionaries(
            fields,
            optional={
                "description": WORDS,
                "default": st.sampled_from([None, True, 3, 1.5, "é", [1], {"k": 2}]),
            },
        )

    numbers = st.integers(0, 9)
    leaf = st.one_of(
        st.booleans(),
        st.just({}),
        common({"type": st.sampled_from(["string", "number", "integer", "boolean", "null"])}),
        common({"type": st.just("string"), "maxLength": numbers, "minLength": numbers, "pattern": st.just("^a")}),
        common({"type": st.just("integer"), "maximum": numbers, "minimum": numbers}),
        common({"type": st.lists(st.sampled_from(["string", "array", "object", "null", "integer"]), min_size=1)}),
        common({"enum": st.lists(st.sampled_from(["x", 1, None, True]), min_size=1)}),
        common(
            {
                "type": st.just(["string", "null"]),
                "enum": st.lists(st.sampled_from(["x", None, 2]), min_size=1),
            }
        ),
        common({"$ref": st.sampled_from(["#", "#/$defs/Node", "#/$defs/Missing", "#/definitions/Node"])}),
        st.just({"description": "no type"}),
    )

    def extend(inner):
        return st.one_of(
            common({"type": st.just("array"), "items": inner, "minItems": numbers}),
            common({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
            _objects(inner),
        )

    return st.recursive(leaf, extend, max_leaves=6)


def _objects(inner):
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=4),
            "required": st.lists(NAMES, unique=True, max_size=3),
            "additionalProperties": st.booleans() | inner,
            "description": WORDS,
            "$defs": st.fixed_dictionaries({"Node": inner}),
        },
    )


@settings(max_examples=300, deadline=None)
@given(
    functions=st.lists(
        st.fixed_dictionaries({"name": NAMES}, optional={"description": WORDS, "parameters": _objects(_schemas())}),
        max_size=3,
    )
)
def test_declarations_equal_moonshots_encoder(functions):
    """Oracle: Moonshot's own encoder, as tinker-cookbook ships it (loaded alone, it has no dependencies)."""
    spec = importlib.util.find_spec("tinker_cookbook")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("tinker-cookbook is not installed")
    path = Path(spec.submodule_search_locations[0]) / "renderers" / "kimi_k2_5_tool_declaration_ts.py"
    loaded = importlib.util.spec_from_file_location("moonshot_encoder", path)
    oracle = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(oracle)
    logging.getLogger("moonshot_encoder").disabled = True
    tools = [{"type": "function", "function": function} for function in functions] + [{"type": "_plugin"}]
    try:
        expected = oracle.encode_tools_to_typescript_style(tools)
    except (ValueError, KeyError, AttributeError):
        with pytest.raises(ToolSchemaError):
            declare_tools(tools)
    else:
        assert declare_tools(tools) == expected


def test_declaration():
    assert declare_tools([WEATHER]) == (
        "# Tools\n\n## functions\nnamespace functions {\n// Weather of a city.\n// Metric.\n"
        "type get_weather = (_: {\n  // Name of the city\n  // minLength: 1\n  city: string,\n"
        '  days?: Array<\n    // maximum: 6\n    number\n  >,\n  // Default: "C"\n  unit?: "C" | "F"\n'
        "}) => any;\n}\n"
    )


def test_tools_without_typescript_form_are_declared_as_json(tiny, caplog):
    tokenizer, template = tiny
    tools = [{"type": "function", "function": {"parameters": {"properties": {"x": {"b": 1, "a": 2}}}, "name": "f"}}]
    text = tokenizer.decode(template.encode([{"role": "user", "content": "x"}], tools))
    compact = json.dumps(tools, separators=(",", ":"), sort_keys=True)
    assert f"<|im_system|>tool_declare<|im_middle|>{compact}<|im_end|>" in text
    assert "declared as JSON" in caplog.text
