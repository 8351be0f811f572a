"""Where the six figures of an efficiency file are from: fitted to all published products of a device together.

    python -m comm_rows.fit_products          from the folder `benchmarks`

Each figure has a width around what is usual, so that products which say nothing about it leave it there. Beside the
fit: what the figures of one of the sweep's two models say of the other (held out). Prints; writes nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bitwright.parallel.efficiency import Efficiency
from bitwright.parallel.gemm_time import gemm_time
from comm_rows.read import read_rows
from comm_rows.sources import find_device

#: Figure → (usual value, width of its logarithm).
_FIGURES = {
    "launch_s": (3e-6, 0.5),
    "memory_share": (0.85, 0.1),
    "half_bytes": (2e6, 0.7),
    "matmul_share": (0.8, 0.1),
    "prologue_columns": (60.0, 0.7),
    "sharpness": (3.5, 0.4),
}
_ROW_WIDTH = 0.1
_DEVICES = {"A100": "a100-sxm", "H100": "h100-sxm", "A40": "a40"}


def main() -> None:
    """Fit every device that has a sweep, and print the figures with their errors."""
    rows = [row for row in read_rows("gemm") if row["repo"] == "microsoft/vidur"]
    for start, name in _DEVICES.items():
        own = [row for row in rows if row["device"].startswith(start)]
        figures = _fit(name, own)
        print(f"{name}: {len(own)} products, mean error {_error(name, own, figures):.1%}")
        for figure, value in zip(_FIGURES, figures, strict=True):
            print(f"    {figure} = {value:.4g}")
        halves = [[row for row in own if ("70b" in row["where"]) == is_large] for is_large in (True, False)]
        held = [_error(name, other, _fit(name, half)) for half, other in (halves, halves[::-1])]
        print(f"    held out: {held[0]:.1%} (7B from 70B), {held[1]:.1%} (70B from 7B)")


def _fit(name: str, rows: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    usual = np.log([value for value, _ in _FIGURES.values()])
    widths = np.array([width for _, width in _FIGURES.values()])

    def residuals(point: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        record = _record(name, np.exp(point))
        off = [math.log(_seconds(name, record, row) / (1e-6 * row["time_us"])) / _ROW_WIDTH for row in rows]
        return np.concatenate([off, (point - usual) / widths])

    return np.exp(least_squares(residuals, usual, loss="soft_l1", diff_step=1e-3, max_nfev=30).x)


def _record(name: str, figures: np.ndarray[Any, np.dtype[np.float64]]) -> Efficiency:
    launch, memory, half, share, columns, sharpness = (float(value) for value in figures)
    return replace(
        find_device(name)[1],
        launch_s=launch,
        memory_share=min(1.0, memory),
        half_bytes=half,
        matmul_share=MappingProxyType({"fp16": min(1.0, share)}),
        prologue_columns=columns,
        sharpness=max(1.0, sharpness),
    )


def _seconds(name: str, record: Efficiency, row: dict[str, Any]) -> float:
    return gemm_time(find_device(name)[0], record, m=row["m"], n=row["n"], k=row["k"], format="fp16").seconds


def _error(name: str, rows: list[dict[str, Any]], figures: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    record = _record(name, figures)
    return float(np.mean([abs(_seconds(name, record, row) / (1e-6 * row["time_us"]) - 1) for row in rows]))


if __name__ == "__main__":
    main()
