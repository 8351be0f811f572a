"""The plots of a report, as SVG text that takes its text colour and font from the page.

Three questions, one figure each: how far can the predictions be trusted (predicted against measured KL, both axes
logarithmic, with the line of equality and the band of a factor 2), was a better deal to be had (the Pareto front), and
where does the error sit (KL by layer). Output is the same bytes for the same plan: no date, salted ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from bitwright.errors import MissingExtra
from bitwright.plan import Plan, Prediction
from bitwright.report.layer_map import layer_of

#: Colours that stand for the page's own: matplotlib writes them, the page replaces them.
_INK, _FAINT, _PAPER = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {_INK: "currentColor", _FAINT: "var(--line)", _PAPER: "var(--card)"}
_MARKERS = "osD^vP*X<>hpd"
_NEUTRAL = "#8a8f98"
_LIMIT = "#d9483b"


def _pyplot() -> ModuleType:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtra("matplotlib", "report", "drawing a report") from error
    matplotlib.use("Agg", force=False)
    from matplotlib import pyplot

    module: ModuleType = pyplot
    return module


def _style(name: str) -> dict[str, Any]:
    return {
        "svg.hashsalt": f"bitwright-{name}",
        "svg.fonttype": "none",
        "font.size": 9.5,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "xtick.color": _FAINT,
        "ytick.color": _FAINT,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
        "xtick.minor.visible": False,
        "axes.grid": True,
        "grid.color": _FAINT,
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


def _finish(plt: ModuleType, figure: Any, name: str) -> str:
    """Return the figure as an ``<svg>`` element in the page's colours and font."""
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


def draw_predictions(plan: Plan, colours: Mapping[str, str]) -> str | None:
    """Predicted against measured KL; None where nothing positive was both predicted and measured."""
    points = [point for point in plan.predictions if point.predicted_kl > 0 and point.measured_kl > 0]
    if not points:
        return None
    plt = _pyplot()
    with plt.rc_context(_style("predictions")):
        figure, axes = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
        values = [value for point in points for value in (point.predicted_kl, point.measured_kl)]
        low, high = min(values) / 2.2, max(values) * 2.2
        axes.fill_between(
            [low, high], [low / 2, high / 2], [low * 2, high * 2], color=_NEUTRAL, alpha=0.13, linewidth=0
        )
        axes.plot([low, high], [low, high], color=_INK, linewidth=0.9, label="equal (band: a factor of 2)")
        for label, colour, marker, chosen in _series(points, colours):
            is_total = marker == "*"
            axes.plot(
                [point.predicted_kl for point in chosen],
                [point.measured_kl for point in chosen],
                linestyle="none",
                marker=marker,
                markersize=10 if is_total else 5.5,
                color=colour,
                markeredgecolor=_INK,
                markeredgewidth=0.35 if marker in "o." else 0.9,
                label=label,
                zorder=4 if is_total else 3,
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_xlabel("predicted KL (nats per token)")
        axes.set_ylabel("measured KL (nats per token)")
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2, handletextpad=0.4)
        return _finish(plt, figure, "predictions")


def _series(points: list[Prediction], colours: Mapping[str, str]) -> list[tuple[str, str, str, list[Prediction]]]:
    """Split points into (label, colour, marker, points): by scheme in order of bits, roles as planned, whole models."""
    series = []
    for kind, marker in (("site", "."), ("role", "o")):
        alone = [point for point in points if point.kind == kind]
        series += [
            (f"one {kind} in {scheme}", colour, marker, [point for point in alone if point.scheme == scheme])
            for scheme, colour in colours.items()
        ]
        series.append(
            (f"one {kind}, other schemes", _NEUTRAL, marker, [point for point in alone if point.scheme not in colours])
        )
    series += [
        ("one role as planned", _PAPER, "D", [point for point in points if point.kind == "plan_role"]),
        ("whole model", "#FEDA8B", "*", [point for point in points if point.kind == "total"]),
    ]
    return [row for row in series if row[-1]]


def draw_frontier(plan: Plan) -> str | None:
    """The Pareto front: KL against effective bits, with the limits, bf16's floor and the plan that was chosen."""
    front = sorted((point for point in plan.frontier if point.predicted_kl > 0), key=lambda point: point.effective_bits)
    if not front:
        return None
    plt = _pyplot()
    with plt.rc_context(_style("frontier")):
        figure, axes = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
        axes.plot(
            [point.effective_bits for point in front],
            [point.predicted_kl for point in front],
            color="#4A7BB7",
            linewidth=1.6,
            marker="o",
            markersize=4.5,
            markerfacecolor=_PAPER,
            label="best plans, predicted",
        )
        # The plan's own measurement is the star, which hides anything under it.
        measured = [
            (point.effective_bits, point.measured_kl) for point in front if point.measured_kl and not point.chosen
        ]
        if measured:
            axes.plot(*zip(*measured, strict=True), "D", color="#F67E4B", markersize=5.5, label="the same, measured")
        if plan.measured is not None:
            kl, bits = plan.measured.kl, plan.summary.effective_bits
            axes.errorbar(
                [bits],
                [kl.mean],
                yerr=[[max(kl.mean - kl.low, 0)], [max(kl.high - kl.mean, 0)]],
                fmt="*",
                color="#FEDA8B",
                markeredgecolor=_INK,
                markeredgewidth=0.9,
                markersize=14,
                ecolor=_INK,
                capsize=3,
                linewidth=1.1,
                zorder=5,
                label=f"this plan, measured ({100 * plan.measured.confidence:.0f} % interval)",
            )
            if plan.measured.bf16_floor_kl > 0:
                axes.axhline(plan.measured.bf16_floor_kl, color=_NEUTRAL, linewidth=1, linestyle=(0, (1, 2)))
                _note_on_line(axes, plan.measured.bf16_floor_kl, "bf16's own KL (floor)", at_right=False)
        if plan.budget.max_kl is not None:
            axes.axhline(plan.budget.max_kl, color=_LIMIT, linewidth=1.1, linestyle=(0, (5, 3)))
            _note_on_line(axes, plan.budget.max_kl, "limit: max_kl", at_right=True)
        if plan.budget.effective_bits is not None:
            axes.axvline(plan.budget.effective_bits, color=_LIMIT, linewidth=1.1, linestyle=(0, (5, 3)))
            axes.annotate(
                "limit: effective bits",
                (plan.budget.effective_bits, 0.02),
                xycoords=axes.get_xaxis_transform(),
                xytext=(4, 0),
                textcoords="offset points",
                size=8.5,
            )
        axes.set_yscale("log")
        axes.set_xlabel("effective bits (stored bits per decoder weight)")
        axes.set_ylabel("KL (nats per token)")
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2, handletextpad=0.5)
        return _finish(plt, figure, "frontier")


def _note_on_line(axes: Any, height: float, text: str, *, at_right: bool) -> None:
    axes.annotate(
        text,
        (1.0 if at_right else 0.0, height),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2 if at_right else 4, 3),
        textcoords="offset points",
        ha="right" if at_right else "left",
        size=8.5,
    )


def draw_site_errors(plan: Plan, colours: Mapping[str, str]) -> str | None:
    """KL that each site costs, by layer: colour tells the scheme, shape the role."""
    sites = [(layer, site) for site in plan.sites if (layer := layer_of(site)) is not None and site.predicted_kl > 0]
    if not sites:
        return None
    plt = _pyplot()
    roles = list(dict.fromkeys(site.role for _, site in sites))
    with plt.rc_context(_style("errors")):
        figure, axes = plt.subplots(figsize=(11.6, 3.9), layout="constrained")
        for index, role in enumerate(roles):
            chosen = [(layer, site) for layer, site in sites if site.role == role]
            shift = (index - (len(roles) - 1) / 2) * 0.7 / max(len(roles), 1)
            axes.scatter(
                [layer + shift for layer, _ in chosen],
                [site.predicted_kl for _, site in chosen],
                c=[colours[site.scheme] for _, site in chosen],
                marker=_MARKERS[index % len(_MARKERS)],
                s=30,
                edgecolors=_INK,
                linewidths=0.35,
                zorder=3,
            )
            axes.plot([], [], _MARKERS[index % len(_MARKERS)], color="none", markeredgecolor=_INK, label=role)
        for scheme, colour in colours.items():
            if any(site.scheme == scheme for _, site in sites):
                axes.plot([], [], "s", color=colour, markeredgecolor=_INK, markeredgewidth=0.35, label=scheme)
        axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.015)
        axes.set_xlabel("layer")
        axes.set_ylabel("predicted KL of the site\n(nats per token)")
        figure.legend(loc="outside right center", handletextpad=0.3)
        return _finish(plt, figure, "errors")
