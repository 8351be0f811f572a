"""Rows of `benchmarks/data/comm/*.json`: facts, each with the file of its source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "comm"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with what was predicted of it; seconds, or bytes, or whatever the group is about."""

    row: str
    group: str
    measured: float
    predicted: float
    constant: float | None = None
    roofline: float | None = None
    is_calibration: bool = False
    #: Whether figures of the device were fitted to the row's whole sweep.
    is_fitted: bool = False
    #: Among how many GPUs; what rows of a group are ordered by.
    gpus: int = 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A row that is not predicted, and why."""

    row: str
    reason: str


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file, each with the path of its source as `where`."""
    content = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    sources = content["sources"]
    rows = []
    for row in content["rows"]:
        source = sources[row["source"]]
        rows.append({**row, "where": source.get("path") or source.get("url", ""), "repo": source.get("repo", "")})
    return rows


def calibration_rows(rows: list[dict[str, Any]], size: str) -> list[dict[str, Any]]:
    """Return the rows that a group is calibrated on: with the smallest, median and largest `size`; ties by place."""
    ordered = sorted(rows, key=lambda row: row[size])
    if len(ordered) < 3:
        return ordered[:1] if len(ordered) == 2 else []
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
