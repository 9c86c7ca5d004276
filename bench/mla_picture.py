"""Picture of `mla.py`'s rows: time over context for each number of tokens, one request, with both ceilings.

python bench/mla_picture.py bench/results/mla_h200.json bench/results/mla_h200.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 36, 44
COLOURS = ("#1f6feb", "#1a7f37", "#bf8700", "#8250df", "#0a3069")
CEILING = "#cf222e"


def picture(result: dict[str, Any]) -> str:
    """An SVG document; both axes are logarithmic."""
    rows = [row for row in result["rows"] if row["requests"] == 1 and row["context"] > 0]
    contexts = sorted({row["context"] for row in rows})
    tokens = sorted({row["T"] for row in rows})
    low, high = 1.0, 10 ** math.ceil(math.log10(max(row["us"] for row in rows)))

    def x(context: float) -> float:
        part = math.log(context / contexts[0]) / math.log(contexts[-1] / contexts[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * part

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(max(us, low) / low) / math.log(high / low)

    def line(points: list[tuple[float, float]], style: str) -> str:
        return f'<path d="M{"L".join(f"{px:.1f} {py:.1f}" for px, py in points)}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">Verify attention with W_UV, microseconds by context, 8 heads, '
        f"{result['device']}</text>",
    ]
    us = low
    while us <= high:
        parts.append(f'<path d="M{LEFT} {y(us):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(us) + 4:.1f}" text-anchor="end">{us:g}</text>')
        us *= 10
    for context in contexts:
        label = f"{context // 1024}k" if context % 1024 == 0 else f"{context // 1000}k"
        parts.append(f'<text x="{x(context):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    label_at = float(HEIGHT)
    for colour, count in zip(COLOURS, tokens, strict=False):
        mine = sorted((row for row in rows if row["T"] == count), key=lambda row: row["context"])
        parts.append(line([(x(r["context"]), y(r["us"])) for r in mine], f'stroke="{colour}" stroke-width="2"'))
        parts += [f'<circle cx="{x(r["context"]):.1f}" cy="{y(r["us"]):.1f}" r="3" fill="{colour}"/>' for r in mine]
        label_at = min(y(mine[-1]["us"]) + 4, label_at - 14)  # from below, none over another
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{label_at:.1f}" fill="{colour}">T = {count}</text>')
    ends = {
        "KV bytes over the read rate": lambda context: context * 1152 / result["read_TBps"] / 1e6,
        f"FLOP of T = {tokens[-1]} over mma.sync": lambda context: (
            2 * tokens[-1] * 8 * context * 1088 / result["mma_TFLOPs"] / 1e6
        ),
    }
    for index, (label, ceiling) in enumerate(ends.items()):
        dash = f'stroke="{CEILING}" stroke-dasharray="{5 - 3 * index} 4"'
        parts.append(line([(x(context), y(ceiling(context))) for context in contexts], dash))
        parts.append(f'<path d="M{LEFT + 8} {TOP + 8 + 18 * index}h24" {dash}/>')
        parts.append(f'<text x="{LEFT + 38}" y="{TOP + 12 + 18 * index}" fill="{CEILING}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text())))
