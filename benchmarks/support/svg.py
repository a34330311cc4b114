"""Draws curves as a small SVG."""

from __future__ import annotations

from collections.abc import Mapping

COLOURS = (
    "#444444", "#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#f39c12", "#16a085", "#d35400",
    "#7f8c8d", "#2c3e50", "#e84393",
)  # fmt: skip
WIDTH, HEIGHT = 720, 360
LEFT, TOP, RIGHT, BOTTOM = 48, 20, 16, 36
MOST_POINTS = 120
"""Of a curve: more cannot be seen."""


def draw(curves: Mapping[str, Mapping[int, float]], first: int = 0) -> str:
    """Return a picture of curves by name: value by step, from a step on."""
    shown = {
        name: [(s, v) for s, v in sorted(curve.items()) if s >= first]
        for name, curve in curves.items()
    }
    values = [v for points in shown.values() for _, v in points]
    low, high, last = min(values), max(values), max(p[-1][0] for p in shown.values())
    span, steps = (high - low) or 1.0, (last - first) or 1
    lines = []
    for number, (name, points) in enumerate(shown.items()):
        thinned = points[:: max(1, len(points) // MOST_POINTS)]
        places = " ".join(
            f"{LEFT + (s - first) / steps * (WIDTH - LEFT - RIGHT):.0f},"
            f"{TOP + (high - v) / span * (HEIGHT - TOP - BOTTOM):.1f}"
            for s, v in thinned
        )
        colour = COLOURS[number % len(COLOURS)]
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}"/>')
        y = TOP + 12 + 14 * number
        lines.append(f'<text x="{WIDTH - 300}" y="{y}" fill="{colour}">{name}</text>')
    lines += [
        f'<text x="4" y="{TOP + 4}">{high:.2f}</text>',
        f'<text x="4" y="{HEIGHT - BOTTOM}">{low:.2f}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}">held-out loss, steps {first} to {last}</text>',
    ]
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'
    )
