"""The plots of a report, as SVG text that takes its text colour and font from the page.

Three questions, one figure each: how far can the predictions be trusted (predicted against measured KL, both axes
logarithmic, with the line of equality and the band of a factor 2), was a better deal to be had (the Pareto front), and
where does the error sit (KL by layer). Output is the same bytes for the same plan: no date, salted ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwright.plan import Plan, Prediction
from bitwright.report.layer_map import layer_of
from bitwright.report.plotting import INK, PAPER, load_pyplot, plot_style, svg_element

_MARKERS = "osD^vP*X<>hpd"
_NEUTRAL = "#8a8f98"
_LIMIT = "#d9483b"


def draw_predictions(plan: Plan, colours: Mapping[str, str]) -> str | None:
    """Predicted against measured KL; None where nothing positive was both predicted and measured."""
    points = [point for point in plan.predictions if point.predicted_kl > 0 and point.measured_kl > 0]
    if not points:
        return None
    plt = load_pyplot()
    with plt.rc_context(plot_style("predictions")):
        figure, axes = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
        values = [value for point in points for value in (point.predicted_kl, point.measured_kl)]
        low, high = min(values) / 2.2, max(values) * 2.2
        axes.fill_between(
            [low, high], [low / 2, high / 2], [low * 2, high * 2], color=_NEUTRAL, alpha=0.13, linewidth=0
        )
        axes.plot([low, high], [low, high], color=INK, linewidth=0.9, label="equal (band: a factor of 2)")
        for label, colour, marker, chosen in _series(points, colours):
            is_total = marker == "*"
            axes.plot(
                [point.predicted_kl for point in chosen],
                [point.measured_kl for point in chosen],
                linestyle="none",
                marker=marker,
                markersize=10 if is_total else 5.5,
                color=colour,
                markeredgecolor=INK,
                markeredgewidth=0.35 if marker in "o." else 0.9,
                label=label,
                zorder=4 if is_total else 3,
            )
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_xlabel(f"predicted KL (nats per {plan.kl_unit})")
        axes.set_ylabel(f"measured KL (nats per {plan.kl_unit})")
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2, handletextpad=0.4)
        return svg_element(plt, figure, "predictions")


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
        ("one role as planned", PAPER, "D", [point for point in points if point.kind == "plan_role"]),
        ("whole model", "#FEDA8B", "*", [point for point in points if point.kind == "total"]),
    ]
    return [row for row in series if row[-1]]


def draw_frontier(plan: Plan) -> str | None:
    """The Pareto front: KL against effective bits, with the limits, bf16's floor and the plan that was chosen."""
    front = sorted((point for point in plan.frontier if point.predicted_kl > 0), key=lambda point: point.effective_bits)
    if not front:
        return None
    plt = load_pyplot()
    with plt.rc_context(plot_style("frontier")):
        figure, axes = plt.subplots(figsize=(5.6, 4.6), layout="constrained")
        axes.plot(
            [point.effective_bits for point in front],
            [point.predicted_kl for point in front],
            color="#4A7BB7",
            linewidth=1.6,
            marker="o",
            markersize=4.5,
            markerfacecolor=PAPER,
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
                markeredgecolor=INK,
                markeredgewidth=0.9,
                markersize=14,
                ecolor=INK,
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
        axes.set_ylabel(f"KL (nats per {plan.kl_unit})")
        figure.legend(loc="outside upper left", ncols=2, columnspacing=1.2, handletextpad=0.5)
        return svg_element(plt, figure, "frontier")


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
    plt = load_pyplot()
    roles = list(dict.fromkeys(site.role_label for _, site in sites))
    with plt.rc_context(plot_style("errors")):
        figure, axes = plt.subplots(figsize=(11.6, 3.9), layout="constrained")
        for index, role in enumerate(roles):
            chosen = [(layer, site) for layer, site in sites if site.role_label == role]
            shift = (index - (len(roles) - 1) / 2) * 0.7 / max(len(roles), 1)
            axes.scatter(
                [layer + shift for layer, _ in chosen],
                [site.predicted_kl for _, site in chosen],
                c=[colours[site.scheme] for _, site in chosen],
                marker=_MARKERS[index % len(_MARKERS)],
                s=30,
                edgecolors=INK,
                linewidths=0.35,
                zorder=3,
            )
            axes.plot([], [], _MARKERS[index % len(_MARKERS)], color="none", markeredgecolor=INK, label=role)
        for scheme, colour in colours.items():
            if any(site.scheme == scheme for _, site in sites):
                axes.plot([], [], "s", color=colour, markeredgecolor=INK, markeredgewidth=0.35, label=scheme)
        axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="x")
        axes.margins(x=0.015)
        axes.set_xlabel("layer")
        axes.set_ylabel(f"predicted KL of the site\n(nats per {plan.kl_unit})")
        figure.legend(loc="outside right center", handletextpad=0.3)
        return svg_element(plt, figure, "errors")
