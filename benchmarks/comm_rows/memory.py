"""Bytes of published runs, and whether those that ran out of memory are named.

A group is one source on one device, or `per_source` on all its devices; three rows calibrate it (smallest, median,
largest number of GPUs), by factors of activations and of what is around. Runs that ran are right where they are
predicted to fit, those that ran out of memory where they are predicted not to (`name_out_of_memory`). The constant is
the calibration rows' mean of bytes over 16 bytes a parameter of a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from bitwright.hardware.memory import StateBits
from bitwright.parallel.job import Job
from bitwright.parallel.memory import AROUND_BYTES, MemoryFacts, layout_memory
from bitwright.parallel.step_time import shard_parameters
from comm_rows.fit import fit_factors
from comm_rows.read import LeftOut, Prediction, calibration_rows, read_rows
from comm_rows.training import find_job

_MIXED = StateBits(parameters=16, masters=32, gradients=32, moments=64)
#: First part of an id → how its library keeps states and activations.
_FACTS = {
    "bloom": MemoryFacts(states=replace(_MIXED, gradients=16), attention="stored", dropout_bits=8),
    "bloom-bf16": MemoryFacts(states=replace(_MIXED, gradients=48), attention="stored", dropout_bits=8),
    "nt": MemoryFacts(states=replace(_MIXED, gradients=48)),
    "tt": MemoryFacts(states=StateBits(parameters=32, gradients=32, moments=64)),
    "ao": MemoryFacts(states=StateBits(parameters=32, gradients=32, moments=64)),
    "pt": MemoryFacts(states=StateBits(parameters=32, gradients=32, moments=64)),
}
_WIDTHS = {"activations": 0.4, "around": 0.7}
#: Share of a device that a run can fill.
_USABLE = 0.98


@dataclass(frozen=True, kw_only=True)
class Named:
    """A run that did or did not run out of memory, and what is said of it."""

    row: str
    group: str
    ran_out: bool
    is_said_to: bool


def predict_memory(*, per_source: bool = False) -> tuple[list[Prediction], list[LeftOut]]:
    """Return every row with bytes, predicted or left out."""
    groups, left = _groups(per_source=per_source)
    return [found for group, rows in groups.items() for found in _predict_group(group, rows)], left


def name_out_of_memory() -> tuple[list[Named], list[LeftOut]]:
    """Return what is said of every run that ran out of memory, and of those that ran and calibrated nothing."""
    groups, left = _groups(per_source=False)
    named = []
    for group, rows in groups.items():
        chosen, factors = _calibrated(rows)
        named += [
            Named(
                row=row["id"], group=group, ran_out=bool(row.get("oom")), is_said_to=not _fits(row, factors)
            )
            for row in rows
            if row not in chosen
        ]  # fmt: skip
    out = {row["id"] for row in read_rows("training") if row.get("oom")}
    return named, [entry for entry in left if entry.row in out]


def _groups(*, per_source: bool) -> tuple[dict[str, list[dict[str, Any]]], list[LeftOut]]:
    left: list[LeftOut] = []
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_rows("training"):
        bytes_there = row.get("mem_gb", 0) * 1e9 or row.get("mem_gib", 0) * 2**30
        if not bytes_there and not row.get("oom"):
            if "mem_param_opt_gib" in row:
                left.append(LeftOut(row=row["id"], reason="the paper's own formula, nothing measured"))
            continue
        found = find_job({name: value for name, value in row.items() if name != "oom"})
        if isinstance(found, str):
            left.append(LeftOut(row=row["id"], reason=found))
            continue
        prefix = row["id"].split("-")[0]
        facts = _FACTS.get("bloom-bf16" if prefix == "bloom" and row["precision"] == "bf16" else prefix)
        if facts is None:
            left.append(LeftOut(row=row["id"], reason="states of the library not known"))
            continue
        source, device, _ = found[1].rsplit(", ", 2)
        group = source if per_source else f"{source}, {device}"
        groups[group].append({**row, "job": found[0], "facts": facts, "bytes": bytes_there})
    return groups, left


def _calibrated(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The rows that calibrate a group, and its factors."""
    chosen = calibration_rows([row for row in rows if row["bytes"]], "gpus")
    measured = [row["bytes"] for row in chosen]
    return chosen, fit_factors(lambda index, found: _bytes(chosen[index], found), measured, _WIDTHS)


def _predict_group(group: str, rows: list[dict[str, Any]]) -> list[Prediction]:
    measured = [row for row in rows if row["bytes"]]
    chosen, factors = _calibrated(rows)
    print(f"  {group}: " + ", ".join(f"{n} × {v:.2f}" for n, v in factors.items()))
    each = [row["bytes"] / _simple(row["job"]) for row in chosen]
    share = math.exp(sum(map(math.log, each)) / len(each)) if each else 1.5
    return [
        Prediction(
            row=row["id"],
            group=group,
            measured=row["bytes"],
            predicted=_bytes(row, factors),
            constant=share * _simple(row["job"]),
            is_calibration=row in chosen,
            gpus=row["gpus"],
        )
        for row in measured
    ]


def _bytes(row: dict[str, Any], factors: dict[str, float]) -> float:
    found = layout_memory(row["job"], row["facts"], around_bytes=factors["around"] * AROUND_BYTES)
    more = (factors["activations"] - 1) * (found.activations + found.logits)
    return found.total + more


def _fits(row: dict[str, Any], factors: dict[str, float]) -> bool:
    return _bytes(row, factors) <= _USABLE * row["job"].device.memory_bytes


def _simple(job: Job) -> float:
    """16 bytes a parameter of the GPU's shard, over the data-parallel GPUs under ZeRO 3."""
    dense, experts = shard_parameters(job)
    return 16 * (dense + experts) / (job.layout.dp if job.layout.zero == 3 else 1)
