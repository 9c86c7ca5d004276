"""Picture of `moe.py`'s rows: bandwidth over the number of tokens, ours and vLLM's, with the read ceiling.

python bench/moe_picture.py bench/results/moe_h200.json bench/results/moe_h200.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 44
OURS, PEER, CEILING = "#1f6feb", "#8c959f", "#cf222e"


def picture(result: dict[str, Any]) -> str:
    """An SVG document."""
    rows = result["rows"]
    ceiling = result["read_TBps"]
    top = math.ceil(ceiling)
    last = math.log2(rows[-1]["T"])

    def x(tokens: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(tokens) / last

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Expert bytes per second (TB/s) by tokens of a pass, '
        f"{result['device']}</text>",
    ]
    for rate in range(top + 1):
        parts.append(f'<path d="M{LEFT} {y(rate):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate}</text>')
    for row in rows:
        at = f'x="{x(row["T"]):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        parts.append(f'<text {at} text-anchor="middle">{row["T"]}</text>')
    level = y(ceiling)
    parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="{CEILING}" stroke-dasharray="5 4"/>')
    parts.append(f'<text x="{LEFT + 6}" y="{level + 14:.1f}" fill="{CEILING}">read ceiling {ceiling:.2f}</text>')
    lines = [("this engine (with router)", OURS, "us"), ("vLLM Marlin (without router)", PEER, "peer_us")]
    for index, (label, colour, key) in enumerate(lines):
        points = [(x(row["T"]), y(row["bytes"] / row[key] / 1e6)) for row in rows if row.get(key)]
        if not points:
            continue
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        place = f'x="{WIDTH - RIGHT - 8}" y="{HEIGHT - BOTTOM - 26 + 16 * index}"'
        parts.append(f'<text {place} text-anchor="end" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text())))
