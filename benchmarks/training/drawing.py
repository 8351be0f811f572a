"""How the plots of this folder look: one style for light and dark pages alike, and the same colour for a policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bitwright.report.plotting import load_pyplot, plot_style

_INK, _FAINT, _PAPER = "#22252b", "#c9ccd2", "#ffffff"
COLOURS = {
    "fp32": "#22252b",
    "tf32": "#7d828c",
    "fp16, no scale": "#A50026",
    "fp16-mixed": "#F67E4B",
    "bf16-mixed": "#4A7BB7",
    "bf16-pure": "#DD3D2D",
    "bf16-pure-sr": "#6EA6CD",
    "bf16-pure-kahan": "#364B9A",
    "fp8-hybrid": "#2E8B57",
    "fp8-block": "#7FB069",
    "mxfp8": "#B8860B",
    "nvfp4": "#8E5A9E",
}


def figure(name: str, rows: int, columns: int, size: tuple[float, float], **further: Any) -> tuple[Any, Any]:
    """Return (figure, axes [rows, columns] as matplotlib squeezes them) in the style of this folder."""
    plt = load_pyplot()
    plt.rcParams.update(plot_style(name, ink=_INK, faint=_FAINT, paper=_PAPER))
    found: tuple[Any, Any] = plt.subplots(rows, columns, figsize=size, layout="constrained", **further)
    return found


def save(drawn: Any, path: Path) -> None:
    """Write an SVG: the same bytes for the same figures."""
    drawn.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    load_pyplot().close(drawn)
    print(f"drawn in {path}", file=sys.stderr)


def smooth(losses: list[float | None], half: int = 8) -> tuple[list[int], list[float]]:
    """(steps, mean of the finite losses around each), where the step's own loss is finite."""
    steps, means = [], []
    for step, loss in enumerate(losses):
        if loss is None:
            continue
        around = [x for x in losses[max(step - half, 0) : step + half + 1] if x is not None]
        steps.append(step)
        means.append(sum(around) / len(around))
    return steps, means
