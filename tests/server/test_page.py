"""The page at / in a real browser: it talks to the server, draws what it is told, and needs nothing from elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from engine_runtime.generation import GenerationRequest, Output, TreeTrace
from tests.server.harness import Live, ScriptedEngine, ids, live_server

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
TEXT = "I think</think>Hello <b>world</b> of trees<|im_end|>"


class Traced(ScriptedEngine):
    """Adds to each step a tree of four rows: a root, two nodes on the path and one beside it."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        async for output in super().generate(request):
            tree = TreeTrace(tuple(ids("one two <b>")[:4]), (-1, 0, 1, 0), (1.0, 0.6, 0.3, 0.2), (0, 1, 2), 65)
            yield replace(output, trace=tree) if request.trace else output


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(Traced()) as server:
        yield server


@pytest.fixture
def page(live: Live):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    live.engine.__dict__.update(Traced().__dict__)
    live.engine.say(TEXT.removesuffix("<|im_end|>"), group=2)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        requested: list[str] = []
        page.on(
            "request",
            lambda request: None if request.url.startswith((live.url, "data:")) else requested.append(request.url),
        )
        page.goto(live.url)
        page.wait_for_selector("#state.ready")
        yield page
        assert problems == []
        assert all(url.startswith((live.url, "data:", "blob:")) for url in requested)
        browser.close()


def until(page, condition: Callable[[], bool]) -> None:
    """The page's policy forbids playwright's own way of waiting for a condition."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def answered(page, turns: int) -> None:
    """The answer that makes this many turns is complete."""
    until(page, lambda: page.locator(".turn").count() == turns and page.is_visible("#send"))


def ask(page, text: str = "hi") -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def test_files_are_the_servers_own(live: Live) -> None:
    reply = httpx.get(live.url)
    policy = reply.headers["content-security-policy"]
    assert reply.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript"), ("tree.js", "text/javascript")):
        assert httpx.get(f"{live.url}/{name}").headers["content-type"].startswith(kind)
    assert "://" not in reply.text


def test_an_answer_with_its_trees(live: Live, page) -> None:
    ask(page, "what <i>grows</i>?")
    answered(page, 2)
    assert page.text_content(".turn.user") == "what <i>grows</i>?"  # text, never markup
    assert page.text_content(".turn.assistant > div").endswith("Hello <b>world</b> of trees")
    assert page.text_content(".turn.assistant details > div") == "I think"
    steps = -(-len(ids(TEXT)) // 2)
    assert page.text_content("#passes") == str(steps)
    assert page.text_content("#per-pass") == "3.00"
    # the last tree: root, two accepted, one rejected, and the bonus token
    assert page.locator("#tree g.accepted").count() == 3
    assert page.locator("#tree g.rejected").count() == 1 and page.locator("#tree g.bonus").count() == 1
    assert page.locator("#depths tbody tr").count() == 2
    assert "verify 1000 ms" in page.text_content("#split-text") and "queue 125 ms" in page.text_content("#split-text")
    request = live.engine.requests[0]
    assert request.trace and request.params.temperature == 0.6
    # an earlier step can be looked at
    page.locator("#step").fill("1")
    assert page.text_content("#step-name").startswith(f"step 1 of {steps}")


def test_the_conversation_goes_on_and_can_be_saved(live: Live, page) -> None:
    for turns in (2, 4):
        ask(page)
        answered(page, turns)
    assert len(live.engine.requests[1].prompt) > len(live.engine.requests[0].prompt) + 5
    with page.expect_download() as saved:
        page.click("#export")
    text = Path(saved.value.path()).read_text(encoding="utf-8")
    assert '"role": "assistant"' in text and '"parents"' in text
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_settings_reach_the_engine(live: Live, page) -> None:
    page.click("summary")
    page.uncheck("#thinking")
    page.fill("#temperature", "0")
    page.fill("#max", "7")
    ask(page)
    answered(page, 2)
    request = live.engine.requests[0]
    assert request.params.temperature == 0 and request.params.max_tokens == 7
    assert list(request.prompt[-2:]) == ids("<think></think>")


def test_stop_ends_the_generation(live: Live, page) -> None:
    async def wait(step: int) -> None:
        if step > 1:
            await asyncio.sleep(30)

    live.engine.before = wait
    ask(page)
    page.wait_for_selector("#stop:not([hidden])")
    page.wait_for_selector("#tree g")
    page.click("#stop")
    page.wait_for_selector("#send:not([hidden])")
    until(page, lambda: bool(live.engine.closed))


def test_an_error_is_shown_as_a_sentence(live: Live, page) -> None:
    live.engine.error, live.engine.finish = "the logits were not numbers", "error"
    ask(page)
    page.wait_for_selector(".error")
    assert page.text_content(".error") == "the logits were not numbers"


def test_a_small_screen_has_one_column(live: Live, page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    ask(page)
    page.wait_for_selector("#tree g")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator("aside").bounding_box()["y"] >= page.locator("#form").bounding_box()["y"]
