"""The front over four axes in two panels that share one: KL against memory, and KL against the time of a token.

Each point has its number from the table, so that it can be found in both panels; colour tells overflows per million
values (none: the calm end), a ring the plan itself, a bar the 95 % interval of the measured KL.
"""

from __future__ import annotations

import math

from bitwright.plan import ParetoPoint, Plan
from bitwright.report.palette import scheme_colours
from bitwright.report.plotting import INK, load_pyplot, plot_style, svg_element

#: Units that an axis is labelled in, the largest first.
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
#: Overflows per million from which on the colour is the warmest.
_MANY_OVERFLOWS = 100.0


def draw_pareto(plan: Plan) -> str | None:
    """KL against memory and against time, measured point by point; None where no front was measured."""
    points = [point for point in plan.pareto if point.kl.mean > 0]
    if len(points) < 2:
        return None
    plt = load_pyplot()
    with plt.rc_context(plot_style("pareto")):
        figure, panels = plt.subplots(1, 2, figsize=(11.6, 4.4), layout="constrained", sharey=True)
        memory = [float(point.memory_bytes) for point in points]
        times = [point.decode_s_per_token for point in points]
        for axes, title, values, units in (
            (panels[0], "memory", memory, _BYTES),
            (panels[1], "time of a token", times, _SECONDS),
        ):
            unit, name = next((u for u in units if max(values) >= u[0]), units[-1])
            scaled = [value / unit for value in values]
            for number, (point, x) in enumerate(zip(points, scaled, strict=True), start=1):
                _draw_point(axes, x, point, str(number))
            axes.set_yscale("log")
            if max(scaled) > 1.5 * min(scaled) > 0:
                axes.set_xscale("log")
            axes.set_xlabel(f"{title} ({name})" + ("" if title == "memory" else f", {points[0].latency_status}"))
        panels[0].set_ylabel(f"measured KL (nats per {plan.kl_unit})")
        panels[0].margins(x=0.07)
        panels[1].margins(x=0.07)
        return svg_element(plt, figure, "pareto")


def overflow_colour(overflows: float) -> str:
    """From calm (no overflow) to warm (many)."""
    ramp = list(scheme_colours([str(step) for step in range(5)]).values())
    if overflows <= 0:
        return ramp[-1]
    share = min(1.0, math.log1p(overflows) / math.log1p(_MANY_OVERFLOWS))
    return ramp[round((1 - share) * (len(ramp) - 2))]


def _draw_point(axes: object, x: float, point: ParetoPoint, label: str) -> None:
    axes.errorbar(  # type: ignore[attr-defined]
        [x],
        [point.kl.mean],
        yerr=[[max(point.kl.mean - point.kl.low, 0)], [max(point.kl.high - point.kl.mean, 0)]],
        fmt="o",
        color=overflow_colour(point.overflows),
        markeredgecolor=INK,
        markeredgewidth=2.2 if point.chosen else 0.4,
        markersize=11 if point.chosen else 7,
        ecolor=INK,
        elinewidth=0.7,
        capsize=2,
        zorder=4 if point.chosen else 3,
    )
    axes.annotate(  # type: ignore[attr-defined]
        label, (x, point.kl.mean), xytext=(7, 5), textcoords="offset points", size=8.5
    )
