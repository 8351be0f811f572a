"""A timeline as an SVG: one row a lane, time from left to right, what waits in red.

Self-contained, no script. Nothing is drawn narrower than half a pixel, so that short collectives are seen.
"""

from __future__ import annotations

from html import escape

from bitwright.parallel.timeline import Category, Timeline
from bitwright.parallel.trace_file import LANES

_COLOURS: dict[Category, str] = {
    "forward": "#4e79a7",
    "backward": "#76b7b2",
    "head": "#b07aa1",
    "collective": "#bab0ac",
    "exposed": "#e15759",
    "optimizer": "#f28e2b",
}
_WIDTH, _LEFT, _ROW, _TOP = 1200, 150, 18, 60
_LEAST_WIDTH = 0.5


def svg_text(timeline: Timeline) -> str:
    """Return a timeline as an SVG document."""
    rows = _rows(timeline)
    height = _TOP + _ROW * len(rows) + 40
    end = timeline.end_s or 1.0
    scale = (_WIDTH - _LEFT - 40) / end
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(timeline.title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="13">{escape(timeline.title)}</text>',
    ]
    for index, (category, colour) in enumerate(_COLOURS.items()):
        at = 10 + 110 * index
        lines.append(f'<rect x="{at}" y="30" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{at + 14}" y="39">{category}</text>')
    for (stage, lane), number in rows.items():
        y = _TOP + _ROW * number
        lines.append(f'<text x="10" y="{y + 12}">stage {stage} {lane}</text>')
        lines.append(f'<line x1="{_LEFT}" y1="{y + _ROW}" x2="{_WIDTH - 20}" y2="{y + _ROW}" stroke="#eee"/>')
    for event in timeline.events:
        if event.duration_s > 0:
            width = max(_LEAST_WIDTH, event.duration_s * scale)
            x, y = _LEFT + event.start_s * scale, _TOP + _ROW * rows[event.stage, event.lane] + 2
            what = escape(f"{event.name}: {1e3 * event.duration_s:.3g} ms at {1e3 * event.start_s:.4g} ms")
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" fill="{_COLOURS[event.category]}" '
                f'stroke="white" stroke-width="0.2"><title>{what}</title></rect>'
            )
    for tick in range(6):
        x = _LEFT + tick / 5 * end * scale
        lines.append(f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle">{1e3 * end * tick / 5:.4g} ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rows(timeline: Timeline) -> dict[tuple[int, str], int]:
    used = {(event.stage, event.lane) for event in timeline.events if event.duration_s > 0}
    ordered = sorted(used, key=lambda key: (key[0], LANES.index(key[1])))
    return {key: number for number, key in enumerate(ordered)}
