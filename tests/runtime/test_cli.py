import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_runtime import bench
from engine_runtime.budget import CostTable, Speculation
from engine_runtime.cli import main
from engine_runtime.decoder import Event
from engine_runtime.engine import EngineError
from engine_runtime.generation import Output
from engine_runtime.ranks import RankError
from engine_runtime.runtime import Runtime
from engine_runtime.stats import DecodeStats, TimeSplit
from engine_runtime.tokenizer import Tokenizer
from plugins.core.engine_file import FileRecord, Manifest
from tests.runtime.vocabulary import write_vocabulary

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{%- for message in messages -%}<|im_{{ 'user' if message.role == 'user' else 'system' }}|>"
    "{{ message.role }}<|im_middle|>{{ message.content }}<|im_end|>{%- endfor -%}<|im_assistant|>assistant<|im_middle|>"
    "{{ '<think>' if thinking else '<think></think>' }}"
)
COSTS = CostTable((1, 8), (0,), ((0.1, 0.2),), {1: 0.05})
ANSWER = "héllo the 中 world"


class FakeRuntime:
    """Answers every request with the same tokens: one from the prefill, then up to three a pass."""

    def __init__(self, tokenizer, answer=ANSWER, finish="stop", error=None, fail_at=None, differ=False):
        self._tokenizer = tokenizer
        self.answer = tokenizer.encode(answer)
        self.finish, self.error, self.fail_at, self.differ = finish, error, fail_at, differ
        self.submitted = []
        self.options = {}
        self.closed = False
        self.stats = DecodeStats(2)
        self.seconds = TimeSplit()
        self.plugin_seconds = None
        self._steps = 0

    def submit(self, request):
        prompt, params, speculation = request.prompt, request.params, request.speculation
        if len(prompt) > 100:
            raise ValueError(f"prompt: {len(prompt)} tokens leave no room")
        self.submitted.append((list(prompt), params, speculation))
        self._left = list(self.answer) if params.stop_ids == () else [*self.answer, self._stop]
        if self.differ and speculation.mode == "tree":
            self._left[0] = ord("#")
        self._first = True
        return len(self.submitted) - 1

    @property
    def _stop(self):
        return self._tokenizer.special_id("<|im_end|>")

    def step(self):
        self._steps += 1
        if self.fail_at == self._steps:
            raise KeyboardInterrupt
        width = 1 if self.submitted[-1][2].mode == "off" or self._first else 3
        self._first = False
        tokens, self._left = tuple(self._left[:width]), self._left[width:]
        self.stats.add_pass(4, len(tokens), True)
        self.stats.add_tree(2, 2, len(tokens) - 1)
        self.seconds.verify += 0.25
        other = Event(9999, Output((1, 2)))  # of someone else's request
        if self._left:
            return [other, Event(len(self.submitted) - 1, Output(tokens))]
        return [Event(len(self.submitted) - 1, Output(tokens, finish=self.finish, error=self.error))]

    def measure_costs(self):
        return COSTS

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


@pytest.fixture
def artifact(tmp_path):
    directory = tmp_path / "engine"
    directory.mkdir()
    write_vocabulary(directory, TEMPLATE)
    manifest = Manifest(
        name="toy",
        model={},
        checkpoint_fingerprint="f",
        tp=1,
        arch="cpu",
        activation_dtype="float32",
        kv_dtype="float32",
        weights="splat",
        layout_versions={},
        limits={"draft_depth": 2},
        files={"rank0.engine": FileRecord(0, "0" * 64)},
    )
    (directory / "engine.json").write_bytes(manifest.to_bytes())
    return directory


@pytest.fixture
def fake(artifact, monkeypatch):
    runtime = FakeRuntime(Tokenizer.load(artifact))

    def open_(directory, **options):
        runtime.options = options
        return runtime

    monkeypatch.setattr(Runtime, "open", open_)
    return runtime


def test_generate_prints_the_text_alone(artifact, fake, capsys):
    assert main(["generate", str(artifact), "--prompt", "hi <|im_end|>", "--threads", "3"]) == 0
    assert capsys.readouterr() == (ANSWER + "\n", "")
    prompt, params, speculation = fake.submitted[0]
    assert prompt == Tokenizer.load(artifact).encode("hi <|im_end|>")  # what a user types stays text
    assert (params.temperature, params.max_tokens, params.stop_ids) == (0.0, 256, None)
    assert speculation == Speculation("tree", None)
    assert fake.options == {"threads": 3, "profile": False, "tensorrt": False} and fake.closed


def test_generate_prints_whole_characters_as_they_come(artifact, fake, monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append)
    flushed = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append(len(written)))
    assert main(["generate", str(artifact), "--prompt", "x", "--speculate", "off"]) == 0
    assert "".join(written) == ANSWER + "\n"
    assert len(written) > 5 and "中" in "".join(written) and all("\ufffd" not in piece for piece in written)
    assert flushed[: len(written)] == list(range(1, len(written) + 1))  # after each piece


def test_generate_passes_every_option_on(artifact, fake):
    options = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 11 --ignore-eos"
    assert main(["generate", str(artifact), "--prompt", "x", *options.split(), "--budget", "5"]) == 0
    _, params, speculation = fake.submitted[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 40)
    assert (params.min_p, params.seed, params.stop_ids) == (0.1, 11, ())
    assert speculation == Speculation("tree", 5)


@pytest.mark.parametrize("thinking", [True, False])
def test_generate_chat(artifact, fake, thinking):
    command = ["generate", str(artifact), "--chat", "<|im_end|>", "--system", "be brief"]
    assert main(command + ([] if thinking else ["--no-thinking"])) == 0
    tokenizer = Tokenizer.load(artifact)
    prompt = fake.submitted[0][0]
    assert tokenizer.decode(prompt) == (
        "<|im_system|>system<|im_middle|>be brief<|im_end|><|im_user|>user<|im_middle|><|im_end|><|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>" + ("<think>" if thinking else "<think></think>")
    )
    assert prompt.count(tokenizer.special_id("<|im_end|>")) == 2  # the user's own is text


def test_generate_reads_a_file_or_stdin(artifact, fake, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file é\n", encoding="utf-8")
    assert main(["generate", str(artifact), "--prompt-file", str(file)]) == 0
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", str(artifact), "--prompt-file", "-"]) == 0
    encoded = Tokenizer.load(artifact).encode("from a file é\n")
    assert [prompt for prompt, _, _ in fake.submitted] == [encoded, encoded]


def test_generate_json(artifact, fake, capsys):
    fake.plugin_seconds = {"embed": 0.5}
    assert main(["generate", str(artifact), "--prompt", "hey", "--json", "--stats"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    count = len(fake.answer) + 1  # with the stop id
    assert err == "" and report["text"] == ANSWER and report["finish"] == "stop" and report["error"] is None
    assert report["tokens"] == [*fake.answer, fake._stop]
    assert (report["prompt_tokens"], report["new_tokens"]) == (3, count)
    passes = 1 + -(-(count - 1) // 3)
    assert report["tokens_per_pass"] == round(count / passes, 4) and report["mean_tree_rows"] == 4
    assert report["acceptance"][0] == {
        "depth": 1,
        "reached": passes,
        "accepted": passes - 1 - (count % 3 == 2),
        "rate": round((passes - 1 - (count % 3 == 2)) / passes, 4),
    }
    seconds = report["seconds"]
    assert seconds["verify"] == 0.25 * passes and seconds["prefill"] == 0
    assert report["tokens_per_second"] > 0 and report["plugin_seconds"] == {"embed": 0.5}


def test_generate_stats(artifact, fake, capsys):
    fake.plugin_seconds = {"embed": 0.01, "mla_attention": 0.2}
    assert main(["generate", str(artifact), "--prompt", "hey", "--stats"]) == 0
    assert fake.options["profile"]
    text, _, table = capsys.readouterr().out.partition("\n")
    assert text == ANSWER
    words = " ".join(table.split())
    passes = fake.stats.passes
    assert "prompt tokens 3 new tokens" in words and "ended by stop" in words
    assert f"{passes} passes, {passes} drafted" in words and "rows/pass 4.00" in words
    assert f"depth reached accepted rate 1 {passes} {fake.stats.accepted[0]}" in words
    for part in ("prefill 0.000", "draft 0.000", f"verify {0.25 * passes:.3f}", "other 0.000"):
        assert part in words
    assert words.index("mla_attention 0.200") < words.index("embed 0.010")


def test_ctrl_c_keeps_what_there_is(artifact, fake, capsys):
    fake.fail_at = 3
    assert main(["generate", str(artifact), "--prompt", "x"]) == 130
    shown = Tokenizer.load(artifact).decode(fake.answer[:4])
    assert capsys.readouterr() == (shown + "\n", "") and fake.closed
    fake.fail_at = fake._steps + 3
    assert main(["generate", str(artifact), "--prompt", "x", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["finish"]) == (shown, "interrupted")


def test_request_that_ends_with_an_error(artifact, fake, capsys):
    fake.finish, fake.error = "error", "the model's logits were not numbers (NaN)"
    assert main(["generate", str(artifact), "--prompt", "x"]) == 1
    assert capsys.readouterr().err == "error: the model's logits were not numbers (NaN)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["generate", "@"], "--prompt --prompt-file --chat is required"),
        (["generate", "@", "--prompt", "x", "--chat", "y"], "not allowed with argument"),
        (["generate", "@", "--prompt", "x", "--system", "y"], "--system and --no-thinking go with --chat"),
        (
            ["generate", "@", "--prompt", "x", "--max-tokens", "many"],
            "--max-tokens: invalid int value: 'many'",
        ),
        (
            ["generate", "@", "--prompt", "x", "--max-tokens", "0"],
            "max_tokens: expected at least 1",
        ),
        (
            ["generate", "@", "--prompt", "x", "--temperature", "-1"],
            "temperature: expected a number of at least",
        ),
        (
            ["generate", "@", "--prompt", "x", "--temperature", "nan"],
            "temperature: expected a number of at least",
        ),
        (["generate", "@", "--prompt", "x", "--top-p", "0"], "top_p: expected above 0"),
        (["generate", "@", "--prompt", "x", "--speculate", "magic"], "invalid choice: 'magic'"),
        (
            ["generate", "@", "--prompt", "x", "--budget", "-1"],
            "tree budget: expected an integer of at least 0",
        ),
        (["generate", "@", "--prompt", "x", "--threads", "0"], "--threads: expected at least 1, found 0"),
        (["generate", "@", "--prompt", "x" * 101], "prompt: 101 tokens leave no room"),
        (["generate", "@", "--prompt-file", "/nowhere/x"], "--prompt-file /nowhere/x: cannot be read"),
        (["generate", "@", "--prompt-file", sys.executable], "not UTF-8 at byte"),
        (
            ["generate", "/nowhere", "--prompt", "x"],
            "/nowhere: no engine here .* build one with `python build.py",
        ),
        (["bench", "/nowhere"], "/nowhere: no engine here"),
        (["bench", "@", "--requests", "0"], "--requests: expected at least 1, found 0"),
        (["bench", "@", "--budgets", "4,x"], "--budgets: expected numbers or auto, like 0,4,8,auto, found '4,x'"),
        (["bench", "@", "--budgets", "4,-8"], "--budgets: expected numbers of at least 0, found -8"),
        (["bench", "@", "--prompts", "/nowhere/p"], "--prompts /nowhere/p: cannot be read"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_1(artifact, fake, capsys, arguments, message):
    assert main([str(artifact) if argument == "@" else argument for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch("error: .*\n", err) and re.search(message, err)


def test_missing_tokenizer_and_template(artifact, fake, capsys):
    (artifact / "chat_template.jinja").unlink()
    assert main(["generate", str(artifact), "--chat", "x"]) == 1
    assert "has no chat template" in capsys.readouterr().err
    (artifact / "tiktoken.model").unlink()
    assert main(["generate", str(artifact), "--prompt", "x"]) == 1
    assert "tiktoken.model is missing" in capsys.readouterr().err


@pytest.mark.parametrize("error", [EngineError("rank0.engine: digest differs"), RankError("rank 1: died\ntrace")])
def test_engine_that_does_not_open(artifact, monkeypatch, capsys, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(Runtime, "open", refuse)
    assert main(["generate", str(artifact), "--prompt", "x"]) == 1
    assert capsys.readouterr().err == f"error: {str(error).splitlines()[0]}\n"


# ---- as a process


def _python(*arguments, **options):
    return [sys.executable, *arguments], {"cwd": ROOT, "text": True, "timeout": 60, **options}


def test_help_is_fast_and_nothing_imports_torch():
    program = "import sys, engine_runtime.cli as c; code = c.main(['--help']); print(code, *sys.modules)"
    command, options = _python("-c", program, capture_output=True)
    done = subprocess.run(command, **options)
    heavy = {"torch", "numpy", "tiktoken", "jinja2"}
    assert "generate" in done.stdout and not heavy & set(done.stdout.splitlines()[-1].split())
    start = time.perf_counter()
    command, options = _python("-m", "engine_runtime", "--help", capture_output=True)
    assert subprocess.run(command, **options).returncode == 0
    assert time.perf_counter() - start < 2  # measured 0.1 s; the margin is for a loaded machine
    program = "import sys, engine_runtime.generate, engine_runtime.bench, engine_runtime.chat; print(*sys.modules)"
    command, options = _python("-c", program, capture_output=True, check=True)
    assert "torch" not in subprocess.run(command, **options).stdout.split()


def test_reader_that_goes_away_causes_no_traceback():
    command, options = _python("-m", "engine_runtime", "doctor", "--json")
    options.pop("timeout")
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, **options)
    os.close(writer)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


def test_ctrl_c_before_generation(artifact):
    program = (
        "import sys, time, engine_runtime.cli as c, engine_runtime.runtime as r\n"
        "def wait(*_, **__): print('opening', flush=True); time.sleep(60)\n"
        "r.Runtime.open = wait\n"
        f"sys.exit(c.main(['generate', {str(artifact)!r}, '--prompt', 'x']))"
    )
    command, options = _python("-c", program)
    options.pop("timeout")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert process.stdout.readline() == "opening\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 130


# ---- bench


@pytest.fixture
def prompts(tmp_path):
    lines = [
        {"id": "c1", "kind": "code", "text": "def f"},
        {"id": "c2", "kind": "code", "text": "class"},
        {"id": "c3", "kind": "code", "text": "import"},
        {"id": "d1", "kind": "chat", "messages": [{"role": "user", "content": "hi"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def test_bench(artifact, fake, prompts, tmp_path, capsys):
    fake.differ = True
    file = tmp_path / "bench.json"
    command = ["bench", str(artifact), "--prompts", str(prompts), "--requests", "3", "--max-tokens", "9"]
    assert main([*command, "--budgets", "0,8,auto,4", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    modes = [(result["mode"], result["budget"]) for result in report["results"]]
    assert modes == [("plain", 0), ("chain", 4), ("chain", 8), ("tree", 4), ("tree", 8), ("tree", "auto")]
    assert [result["identical_to_plain"] for result in report["results"]] == [3, 3, 3, 0, 0, 0]
    count = len(fake.answer) + 1
    plain, chain = report["results"][:2]
    assert plain["new_tokens"] == chain["new_tokens"] == 3 * count
    assert plain["tokens_per_pass"] == 1 and chain["tokens_per_pass"] == pytest.approx(
        count / (1 + -(-(count - 1) // 3)), abs=1e-4
    )
    assert set(plain["tokens_per_pass_by_kind"]) == {"code", "chat"}  # kinds in turn: c1, d1, c2
    assert len(chain["reached"]) == 2 and chain["reached"][0] >= chain["accepted"][0] > 0
    assert report["engine"] == {"path": str(artifact), "name": "toy", "arch": "cpu", "tp": 1}
    assert report["step_costs"] == COSTS.to_json() and fake.submitted[-1][2] == Speculation("tree", None)
    assert report["requests"] == 3 and report["max_tokens"] == 9
    assert report["device"]["cpu"] and report["device"]["threads"] == fake.options["threads"] >= 1
    assert report["date"].endswith("+00:00") and "commit" in report
    # one warm-up, then every mode over the same prompts
    sent = [prompt for prompt, _, _ in fake.submitted[1:]]
    assert len(sent) == 18 and sent[:3] * 6 == sent
    assert {params.max_tokens for _, params, _ in fake.submitted[1:]} == {9}
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:3] == ["mode", "budget", "tokens/s"] and len(table) == 7
    assert table[6].split()[:2] == ["tree", "auto"] and table[6].split()[-1] == "0/3"


def _drop_drafter(artifact):
    value = json.loads((artifact / "engine.json").read_text())
    value.pop("manifest_blake3"), value.pop("schema_version")
    value["files"] = {name: FileRecord(**record) for name, record in value["files"].items()}
    (artifact / "engine.json").write_bytes(Manifest(**{**value, "limits": {"draft_depth": 0}}).to_bytes())


def test_generate_without_a_drafter(artifact, fake, capsys):
    _drop_drafter(artifact)
    assert main(["generate", str(artifact), "--prompt", "x"]) == 0
    assert fake.submitted[0][2] == Speculation("off")
    capsys.readouterr()
    for options in (["--speculate", "chain"], ["--budget", "4"]):
        assert main(["generate", str(artifact), "--prompt", "x", *options]) == 1
        assert "has no drafter: leave --speculate and --budget out" in capsys.readouterr().err


def test_bench_to_stdout_and_without_a_drafter(artifact, fake, prompts, capsys):
    _drop_drafter(artifact)
    assert main(["bench", str(artifact), "--prompts", str(prompts), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert [result["mode"] for result in json.loads(out)["results"]] == ["plain"]
    assert "has no drafter" in err


@pytest.mark.parametrize("line", ["{", "3", '{"kind": "code"}', '{"text": "x"}', '{"kind": "code", "text": 3}'])
def test_bench_refuses_a_malformed_prompt_file(artifact, fake, prompts, capsys, line):
    prompts.write_text('{"kind": "code", "text": "x"}\n' + line + "\n")
    assert main(["bench", str(artifact), "--prompts", str(prompts)]) == 1
    assert f"{prompts} line 2: expected" in capsys.readouterr().err


def test_bench_stops_at_errors_and_ctrl_c(artifact, fake, prompts, capsys):
    command = ["bench", str(artifact), "--prompts", str(prompts)]
    fake.fail_at = 2
    assert main(command) == 130
    fake.finish, fake.error, fake.fail_at = "error", "NaN", None
    assert main(command) == 1
    assert capsys.readouterr().err == "error: prompt c1: NaN\n"


def test_commit_is_this_repository(monkeypatch, tmp_path):
    found = bench.commit()
    assert found is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", found)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.commit() is None
