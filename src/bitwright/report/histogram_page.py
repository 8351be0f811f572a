"""The magnitudes of a checkpoint over the ranges of number formats: one plot, as PNG or on a page of its own.

Above, the share of each octave; below, on the same axis, one bar per format: solid where values keep full precision,
lighter where they are subnormal, nothing where they become 0 (left) or are too large (right).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bitwright import formats
from bitwright.errors import ReportError
from bitwright.models.tensor_survey import Survey
from bitwright.quantize.range_shares import Fate, judge_octave
from bitwright.report.page import load_templates
from bitwright.report.plotting import load_pyplot, plot_style, png_bytes, svg_element
from bitwright.report.render import raise_if_no_report_extra
from bitwright.report.units import spell_share
from bitwright.report.whole_file import write_file

_BAR = "#4A7BB7"
_RANGE = "#F67E4B"
#: Fate of an octave → how solid its part of a format's bar is; no bar where it is lost.
_OPACITY: Mapping[Fate, float] = {"normal": 1.0, "subnormal": 0.4}
_SUFFIXES = (".png", ".html")
#: Octaves that are shown around those with values, so that a range's end is seen where it is near.
_MARGIN = 2
_MAX_TICKS = 13


def raise_if_no_place(path: Path) -> None:
    """Refuse a file that could not be written: before long work, not after.

    Raises:
        MissingExtra: a package that draws is not installed.
        ReportError: the ending is none of .png and .html, the folder is missing, or a folder has that name.
    """
    if path.is_dir():
        what = "no name was given for the plot" if path == Path() else f"'{path}' is a folder"
        raise ReportError(f"{what}; name a file that ends in .png or .html")
    if path.suffix.lower() not in _SUFFIXES:
        what = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise ReportError(f"'{path}' {what}, which tells how to draw; name a file that ends in .png or .html")
    if not path.parent.is_dir():
        raise ReportError(f"'{path}' lies in '{path.parent}', which is no folder; choose another path")
    if not os.access(path.parent, os.W_OK):
        raise ReportError(f"'{path.parent}' may not be written to; choose another path")
    raise_if_no_report_extra()


def write_histogram(survey: Survey, source: str, path: Path) -> Path:
    """Write the plot (.png) or the page (.html) of a survey, completely or not at all; return its path.

    Args:
        survey: from `survey_tensors`.
        source: what was read, for the title.
        path: ends in .png or .html.

    Raises:
        MissingExtra: a package that draws is not installed.
        ReportError: the file cannot be written.
    """
    raise_if_no_place(path)
    content = draw_png(survey, source) if path.suffix.lower() == ".png" else render_page(survey, source)
    return write_file(path, content, "the histogram")


def draw_png(survey: Survey, source: str) -> bytes:
    """Return the plot of a survey as a PNG file, dark on white."""
    plt = load_pyplot()
    with plt.rc_context(plot_style("histogram", ink="#1c1f26", faint="#d5d8db", paper="#ffffff")):
        return png_bytes(plt, _draw(plt, survey, source, paper="#ffffff"))


def render_page(survey: Survey, source: str) -> bytes:
    """Return a self-contained UTF-8 HTML page: the plot, the shares, and the tensors where the survey has rows."""
    plt = load_pyplot()
    with plt.rc_context(plot_style("histogram")):
        plot = svg_element(plt, _draw(plt, survey, None, paper="none"), "histogram")
    page: str = (
        load_templates()
        .get_template("histogram.html.j2")
        .render(
            survey=survey, source=source, plot=plot, largest={name: formats.get(name).max for name in survey.formats}
        )
    )
    return page.encode("utf-8")


def _draw(plt: Any, survey: Survey, title: str | None, paper: str) -> Any:
    first, last = min(survey.octaves, default=-1), max(survey.octaves, default=0)
    low, high = first - _MARGIN, last + 1 + (0 if survey.scaled else _MARGIN)
    num_formats = len(survey.formats)
    figure, (upper, lower) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(9.2, 3.4 + 0.34 * num_formats),
        height_ratios=(3.0, 0.34 * num_formats + 0.2),
        layout="constrained",
    )
    num = survey.statistics.num_finite
    upper.bar(
        [exponent + 0.5 for exponent in survey.octaves],
        [100 * count / num for count in survey.octaves.values()],
        width=0.92,
        color=_BAR,
    )
    upper.set_ylabel("% of finite values")
    upper.set_xlim(low, high)
    if title is not None:
        upper.set_title(title, loc="left", fontsize=11)
    zeros = survey.statistics.num_zero
    if zeros:
        upper.annotate(
            f"zeros, left of every octave: {spell_share(zeros / num)}", (0.01, 0.93), xycoords="axes fraction", size=8.5
        )
    for row, name in enumerate(survey.formats):
        scale = 1 / formats.get(name).max if survey.scaled else 1.0
        fates = {exponent: judge_octave(name, exponent, scale) for exponent in range(low, high)}
        for fate, octaves in groupby(fates, key=fates.__getitem__):
            width = len(left := list(octaves))
            if fate in _OPACITY:
                lower.barh(row, width, left=left[0], height=0.62, color=_RANGE, alpha=_OPACITY[fate], linewidth=0)
        shares = survey.shares[name]
        _note(lower, row, spell_share(shares.flushed), spell_share(shares.overflow))
    _note(lower, -1, "→ 0", "too large")
    lower.set_yticks(range(num_formats), survey.formats)
    lower.set_ylim(num_formats - 0.5, -0.5)
    lower.grid(axis="y", visible=False)
    lower.tick_params(axis="y", length=0)
    step = -(-(high - low) // _MAX_TICKS)
    ticks = [exponent for exponent in range(low, high + 1) if exponent % step == 0]
    lower.set_xticks(ticks, [f"$2^{{{exponent}}}$" for exponent in ticks])
    lower.set_xlabel(
        "magnitude as a share of its tensor's largest, which is put on the format's largest value"
        if survey.scaled
        else "magnitude"
    )
    return figure


def _note(axes: Any, row: int, flushed: str, overflow: str) -> None:
    """Write two figures right of a format's bar."""
    for place, text in ((1.09, flushed), (1.19, overflow)):
        axes.annotate(
            text,
            (place, row),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            size=8.5,
            annotation_clip=False,
        )
