"""How plots are drawn: one style, in the colours and font of the page they stand on, the same bytes every time.

matplotlib writes stand-in colours into the SVG, and `svg_element` replaces them by the page's own variables, so that a
plot follows the reader's light or dark theme. A plot that is no part of a page (PNG) names its colours itself.
"""

from __future__ import annotations

import io
import re
from types import ModuleType
from typing import Any

from bitwright.errors import MissingExtra

#: Colours that stand for the page's own: matplotlib writes them, the page replaces them.
INK, FAINT, PAPER = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--line)", PAPER: "var(--card)"}


def load_pyplot() -> ModuleType:
    """Return ``matplotlib.pyplot``, set to draw into memory.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtra("matplotlib", "report", "drawing a report") from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    module: ModuleType = pyplot
    return module


def plot_style(name: str, *, ink: str = INK, faint: str = FAINT, paper: str = "none") -> dict[str, Any]:
    """Return matplotlib's settings for the plot called ``name``."""
    return {
        "svg.hashsalt": f"bitwright-{name}",
        "svg.fonttype": "none",
        "font.size": 9.5,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": faint,
        "axes.facecolor": "none",
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "xtick.color": faint,
        "ytick.color": faint,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "xtick.minor.visible": False,
        "axes.grid": True,
        "grid.color": faint,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "axes.unicode_minus": True,
        "mathtext.default": "regular",
        "path.simplify": False,
    }


def svg_element(plt: ModuleType, figure: Any, name: str) -> str:
    """Return the figure as an ``<svg>`` element in the page's colours and font, and close it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, replacement in _PAGE_COLOURS.items():
        text = text.replace(colour, replacement)
    text = re.sub(r"font: ([^;\"]*?)(\d[\d.]*)px [^;\"]+", r"font: \1\2px inherit", text)
    text = text.replace("px inherit", "px var(--font)")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1, flags=re.DOTALL)
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg", f'<svg class="figure" id="figure-{name}"', 1).rstrip() + "\n"


def png_bytes(plt: ModuleType, figure: Any) -> bytes:
    """Return the figure as a PNG file, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()
