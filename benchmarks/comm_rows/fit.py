"""How a group is calibrated on its three rows: a few factors, held near 1 by what is believed beforehand.

    least   Σ ρ((log predicted - log measured) / 0.1) + Σ (log factor / width)²

over the factors of `Tuning`: compute (width 0.5), attention beyond that (0.4), collectives within a node (0.1) and
across nodes (0.9). ρ is Huber's: squares up to one width, straight beyond, so that one odd row of three does not
outvote the others. Factors that the rows say nothing about stay where they are. No other figure is changed; what is
predicted of other rows follows. The widths are the same for all groups. They were chosen with the errors of all rows in
sight: between 0.05 and 0.1 for rows, 0.6 and 0.9 across nodes, the mean error of training moves by about one point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_ROW_WIDTH = 0.1
#: Factor → how far from 1 it may be before it is not believed (of its logarithm).
WIDTHS = {"compute": 0.5, "attention": 0.4, "node": 0.1, "link": 0.9}


def fit_factors(
    predict: Callable[[int, dict[str, float]], float], measured: Sequence[float], widths: dict[str, float] | None = None
) -> dict[str, float]:
    """Return the factors that explain the measured figures best.

    Args:
        predict: (index of a row, factors) → seconds.
        measured: seconds of the rows.
        widths: factors and their widths; None: `WIDTHS`.
    """
    widths = WIDTHS if widths is None else widths
    best = dict.fromkeys(widths, 0.0)
    if not measured:
        return {name: math.exp(value) for name, value in best.items()}
    loss = _loss(predict, measured, best, widths)
    step = 0.5
    while step > 0.01:
        moved = False
        for name in widths:
            for sign in (1, -1):
                point = {**best, name: best[name] + sign * step}
                found = _loss(predict, measured, point, widths)
                if found < loss:
                    best, loss, moved = point, found, True
        if not moved:
            step /= 2
    return {name: math.exp(value) for name, value in best.items()}


def _loss(
    predict: Callable[[int, dict[str, float]], float],
    measured: Sequence[float],
    point: dict[str, float],
    widths: dict[str, float],
) -> float:
    factors = {name: math.exp(value) for name, value in point.items()}
    rows = sum(_robust(math.log(predict(index, factors) / value) / _ROW_WIDTH) for index, value in enumerate(measured))
    return rows + sum((point[name] / width) ** 2 for name, width in widths.items())


def _robust(off: float) -> float:
    return off**2 if abs(off) <= 1 else 2 * abs(off) - 1
