import json
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from engine_runtime import tokenizer as module
from engine_runtime.tokenizer import Tokenizer, TokenizerError
from tests.runtime.vocabulary import SPECIAL_OFFSETS, write_vocabulary

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
KIMI = SHARED / "kimi-tokenizer"
GOLDEN = SHARED / "kimi-k2.6-vllm-golden.safetensors"

# text with what matters to the tokenizer: scripts, marks, digits, spaces, line ends, names of special tokens
TEXT = st.lists(
    st.text()
    | st.text("aZé中文ǅʰ́0 \t\r\n'.,<|>", max_size=8)
    | st.sampled_from([*SPECIAL_OFFSETS, "I'LL", "don't", "日本語", "\U0001f642", "<|reserved_token_270|>"])
).map("".join)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def kimi():
    if not (KIMI / "tiktoken.model").exists():
        pytest.skip(f"the real vocabulary is not at {KIMI}")
    return Tokenizer.load(KIMI)


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_encoded_text_decodes_to_itself_and_holds_no_special_token(tiny, text):
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert not any(map(tiny.is_special, ids))
    with_special = tiny.encode(text, allow_special=True)
    assert tiny.decode(with_special) == text
    assert any(map(tiny.is_special, with_special)) == any(name in text for name in tiny.special_tokens)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decode_and_never_splits_a_character(tiny, data, skip):
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1)) | TEXT.map(tiny.encode))
    stream = tiny.stream(skip_special=skip)
    pieces = []
    rest = ids
    while rest:
        count = data.draw(st.integers(1, 3))
        pieces.append(stream.push(rest[:count]))
        rest = rest[count:]
    pieces.append(stream.flush())
    assert "".join(pieces) == tiny.decode(ids, skip_special=skip)


def test_stream_holds_back_an_unfinished_character(tiny):
    stream = tiny.stream()
    assert [stream.push([byte]) for byte in "a\U0001f642".encode()] == ["a", "", "", "", "\U0001f642"]
    assert stream.push([0xE4]) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


def test_special_slots(tiny):
    base = tiny.num_base_tokens
    assert tiny.vocab_size == base + 256
    for name, offset in SPECIAL_OFFSETS.items():
        assert tiny.special_id(name) == base + offset
        assert tiny.encode(name, allow_special=True) == [base + offset]
        assert tiny.decode([base + offset]) == name and tiny.decode([base + offset], skip_special=True) == ""
    assert tiny.special_id(f"<|reserved_token_{base + 100}|>") == base + 100
    assert tiny.stop_ids == {base + 1, base + 2}
    with pytest.raises(TokenizerError, match="no special token '<.nope.>'"):
        tiny.special_id("<|nope|>")
    for outside in (-1, tiny.vocab_size):
        with pytest.raises(TokenizerError, match="outside the vocabulary"):
            tiny.decode([outside])


@settings(max_examples=100, deadline=None)
@given(text=st.text("a \n中", min_size=1, max_size=60), limit=st.integers(1, 7))
def test_no_piece_has_a_longer_run_than_allowed(text, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RUN_CHARS", limit)
        pieces = list(module._split_runs(text))
    assert "".join(pieces) == text
    assert all(len(run) <= limit for piece in pieces for run in regex.findall(r"\s+|\S+", piece))
    # not cut more often than needed
    assert len(pieces) <= 1 + sum((len(run) - 1) // limit for run in regex.findall(r"\s+|\S+", text))


def test_long_runs_and_long_texts_are_encoded_in_pieces(tiny):
    run = module.MAX_RUN_CHARS
    assert len(tiny.encode("th" * run)) == run  # 2 characters a token, and no cut falls inside "th"
    text = "the thing " * (module.MAX_PIECE_CHARS // 4)
    assert tiny.decode(tiny.encode(text)) == text


def test_lone_surrogate_is_replaced(tiny):
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "tiktoken.model").unlink(), "tiktoken.model is missing"),
        (lambda d: (d / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
        (lambda d: (d / "tiktoken.model").write_bytes(b"YQ== 0\n"), "no token for byte 0x00"),
        (lambda d: (d / "tiktoken.model").write_bytes(b"garbage\n"), "line 1 is not 'base64 rank'"),
        (lambda d: (d / "tiktoken.model").open("ab").write(b"enp6 9999\n"), "each rank 0..267 once"),
        (lambda d: (d / "tiktoken.model").open("ab").write(b"!!!! 267\n"), "line 268 is not 'base64 rank'"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "must be JSON with added_tokens_decoder"),
        (lambda d: (d / "tokenizer_config.json").write_text("[]"), "must be JSON with added_tokens_decoder"),
        (lambda d: _add_special(d, "3", "<|x|>"), "names special token 3, but the slots"),
        (lambda d: _add_special(d, "300", "<|im_end|>"), "gives one name to two special tokens"),
        (lambda d: (d / "tokenizer_config.json").write_text("{}"), "no special token '<.im_end.>'"),
    ],
)
def test_unfit_files_are_refused_in_one_sentence(tmp_path, change, message):
    write_vocabulary(tmp_path)
    change(tmp_path)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def _add_special(directory, token_id, name):
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"][token_id] = {"content": name}
    path.write_text(json.dumps(config))


# ---- the real vocabulary


def test_kimi_special_tokens(kimi):
    assert (kimi.num_base_tokens, kimi.vocab_size) == (163584, 163840)
    expected = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|im_end|>": 163586,
        "<|im_user|>": 163587,
        "<|im_assistant|>": 163588,
        "<|reserved_token_163589|>": 163589,
        "<|start_header_id|>": 163590,
        "<|end_header_id|>": 163591,
        "[EOT]": 163593,
        "<|im_system|>": 163594,
        "<|tool_calls_section_begin|>": 163595,
        "<|tool_calls_section_end|>": 163596,
        "<|tool_call_begin|>": 163597,
        "<|tool_call_argument_begin|>": 163598,
        "<|tool_call_end|>": 163599,
        "<|im_middle|>": 163601,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<think>": 163606,
        "</think>": 163607,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert {name: kimi.special_id(name) for name in expected} == expected
    assert kimi.stop_ids == {163585, 163586}


def test_t18_kimi_ids_of_the_real_model_round_trip(kimi):
    """Token ids that the real K2.6 was given and generated, in English, Chinese, code and JSON."""
    if not GOLDEN.exists():
        pytest.skip(f"the recorded token ids are not at {GOLDEN}")
    golden = load_file(GOLDEN)
    tokens, lengths = golden["prompt_tokens"].tolist(), golden["prompt_lens"].tolist()
    prompts = [tokens[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
    text = "The three primary colors of light are red, green, and"
    assert kimi.encode(text) == prompts[0]
    assert prompts[0] == [1008, 3499, 9411, 10447, 318, 3660, 554, 4607, 11, 8372, 11, 316]
    for ids in prompts + golden["tail_tokens"].tolist():
        text = kimi.decode(ids)
        assert "\ufffd" not in text
        assert kimi.encode(text) == ids
        stream = kimi.stream()
        assert "".join([*(stream.push([token]) for token in ids), stream.flush()]) == text


@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_kimi_split_pattern(kimi, text):
    """Pieces by the `regex` package, with `&&[^\\p{Han}]` as a lookahead, encode to the same ids."""
    pattern = module.SPLIT_PATTERN
    for inner in (module._UPPER, module._LOWER):
        without_han = r"(?:(?!\p{Han})" + inner.replace(r"&&[^\p{Han}]", "") + ")"
        pattern = pattern.replace(inner, without_han)
    assert "&&" not in pattern
    pieces = [match.group() for match in regex.finditer(pattern, text)]
    assert "".join(pieces) == text
    assert kimi.encode(text) == [token for piece in pieces for token in kimi.encode(piece)]
