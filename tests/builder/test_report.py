"""The HTML page: it parses, stands alone, has every phase and number, and escapes every name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from builder.describe import buffer_bytes, describe, total_bytes, weight_bytes
from builder.errors import BuildError
from builder.report import render, write_html
from builder.report_figures import Names, arena_map, lifetimes, plugin_class, ticks
from builder.roofline import SM120, plan_costs
from plugins.core.plan import Arg, Phase, Plan
from plugins.core.spec import TensorSpec
from tests.builder.small_engine import IN, OUT, ROWS, hand_plan, k26_verify_1, small_plans

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Checks nesting; collects elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] for _, attrs in self.elements if attribute in attrs]


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return small_plans()


@pytest.fixture(scope="module")
def page(plans: list[Plan]) -> str:
    return render(plans)


def test_page_parses_and_has_every_phase(plans: list[Plan], page: str, tmp_path: Path) -> None:
    parsed = Page(page)
    keys = list(plans[0].phases)
    assert parsed.values("data-key") == keys
    assert parsed.values("data-phase") == keys
    assert [attrs["value"] for tag, attrs in parsed.elements if tag == "option"] == keys
    on = [attrs["data-key"] for tag, attrs in parsed.elements if tag == "section" and "on" in attrs["class"]]
    assert on == ["verify[4]"]
    write_html(plans, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    with pytest.raises(BuildError, match="absent.*page.html: cannot be written: No such file or directory"):
        write_html(plans, tmp_path / "absent" / "page.html")


def test_page_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert "http://" not in page and "https://" not in page and "url(" not in page and "@import" not in page
    assert not {tag for tag, _ in parsed.elements} & {"link", "img", "iframe", "object", "embed"}
    assert not parsed.values("src") and not parsed.values("href") and not parsed.values("xlink:href")


def test_page_has_every_number(plans: list[Plan], page: str) -> None:
    plan, text = plans[0], " ".join(Page(page).text)
    for kind, (_, nbytes) in {**weight_bytes(plan), **buffer_bytes(plan)}.items():
        assert kind in text and f"{nbytes:,}" in text
    assert f"{total_bytes(plan):,}" in text
    marks = [attrs for _, attrs in Page(page).elements if "data-v" in attrs]
    layers = {key: cost.by_layer() for key, cost in plan_costs(plan, 0).items()}
    layered = [key for key, names in layers.items() if 0 in names]
    whole = sum(len(lifetimes(plan.phases[key])) for key in layered)
    assert len(marks) >= whole  # each value once in the map of the pass, some again in that of a layer


def test_names_are_escaped() -> None:
    evil = '</script><b a="1">&\'x'
    plan = hand_plan()
    phase = plan.phases["verify[3]"]
    weight = Arg("weight", evil, 0, TensorSpec((OUT, IN), "bfloat16"))
    out = Arg("arena", evil, 0, TensorSpec((ROWS, OUT), "bfloat16"))
    inputs = (phase.steps[0].inputs[0], weight)
    steps = [replace(step, node=evil, tactic=evil, inputs=inputs, outputs=(out,)) for step in phase.steps]
    steps[1] = replace(phase.steps[1], node=evil, outputs=(out,))
    plan.phases = {f"{evil}[3]": Phase(evil, 3, tuple(steps))}
    page = render([plan])
    parsed = Page(page)
    assert evil not in page
    assert parsed.values("data-key") == [f"{evil}[3]"]
    assert evil in json.loads(re.search(r'id="names">(.*?)</script>', page)[1])  # type: ignore[index]
    assert sum(tag == "script" for tag, _ in parsed.elements) == 2
    assert any(evil in text for text in parsed.text)


def test_engine_without_values_or_layers_is_drawn() -> None:
    plan = hand_plan()
    plan.phases = {"root[1]": Phase("root", 1, ())}
    assert Page(render([plan])).values("data-key") == ["root[1]"]
    assert "root[1]" in describe([plan], "root[1]")


def test_rectangles_of_the_arena_map_are_to_scale() -> None:
    """Two values of equal size, one above the other, in a map of three steps."""
    svg = arena_map(lifetimes(hand_plan().phases["verify[3]"]), 0, 2, Names(), {0: "first"})
    boxes = [
        [float(number) for number in match]
        for match in re.findall(r'class="c\d" d="M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h', svg)
    ]
    (y_left, y_top, y_width, y_height), (z_left, z_top, z_width, z_height) = boxes
    assert y_width == pytest.approx(3 * z_width, rel=0.01)
    assert y_height == z_height
    assert z_left - y_left == pytest.approx(z_width, abs=1.5)
    assert (y_top - z_top) / y_height == pytest.approx(256 / 192, rel=0.02)


@pytest.mark.parametrize("most", [1e-7, 0.9, 1.0, 7.3, 64.0, 1e11])
def test_ticks(most: float) -> None:
    values = ticks(most, 6)
    assert values[0] == 0 and values[-1] <= most * (1 + 1e-9)
    assert 3 <= len(values) <= 8
    assert ticks(0, 6) == [0.0]


def test_every_operator_has_a_colour(plans: list[Plan], page: str) -> None:
    plugins = {step.plugin for phase in plans[0].phases.values() for step in phase.steps}
    assert plugin_class("int4_marlin_gemm") != plugin_class("dense_gemm") != plugin_class("mla_attention")
    for css in {plugin_class(plugin) for plugin in plugins}:
        assert f".{css} {{ fill: var(--{css}); }}" in page
        assert page.count(f"--{css}: #") == 2  # light and dark


def test_lifetimes() -> None:
    y, z = lifetimes(hand_plan().phases["verify[3]"])
    assert (y.name, y.plugin, y.nbytes, y.offset, y.first, y.last) == ("y", "dense_gemm", 192, 256, 0, 2)
    assert (z.name, z.plugin, z.first, z.last) == ("z", "all_reduce", 1, 1)


def test_k26_page_shows_every_layer_and_value() -> None:
    plan = k26_verify_1()
    page = render([plan])
    assert len(page.encode()) < 500_000
    marks = re.findall(r'data-v="(\d+) (\d+) (\d+) (\d+) (\d+)"', page)
    values = lifetimes(plan.phases["verify[1]"])
    names = json.loads(re.search(r'id="names">(.*?)</script>', page)[1])  # type: ignore[index]
    shown = {names[int(mark[0])] for mark in marks}
    assert shown == {value.name for value in values}
    assert len(values) > 900


def test_engine_that_does_not_fit_is_named() -> None:
    assert "115.07 kB too large" in render([replace(hand_plan(), arena_bytes=SM120.memory)])
