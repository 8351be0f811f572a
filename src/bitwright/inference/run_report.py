"""What runs a plan, site by site and why, what it takes in memory, and what it counted.

    planned = bitwright.inference.apply(plan, model, mode="auto")
    print(planned.bitwright_run.table())

Bytes are those of the tensors that are there: codes, scales, offsets, and filling where a kernel wanted it. Beside them
stand the plan's own: where they differ, a note says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from bitwright.inference.counters import RunCounters
from bitwright.inference.modes import Mode, spell_dtype
from bitwright.inference.overflow_watch import OverflowWatch
from bitwright.models.sites import Site
from bitwright.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRun:
    """One site as it runs."""

    name: str
    role: str
    scheme: str
    #: What multiplies.
    kernel: str
    reason: str
    #: Bytes in memory, and those of the plan.
    bytes: int
    plan_bytes: int
    #: The reason without what was passed over, and that one by one.
    own_reason: str | None = None
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRun:
    """One value site as it runs: a cache, an operand of attention, a norm …"""

    name: str
    role: str
    scheme: str
    #: What computes or keeps it.
    kernel: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A model that runs under a plan."""

    mode: Mode
    #: What everything beside codes is computed in.
    dtype: torch.dtype
    #: Why that dtype.
    dtype_reason: str
    device_type: str
    #: Weight sites.
    sites: tuple[SiteRun, ...]
    #: Bytes of everything that is no site: norms, biases …
    other_bytes: int
    #: Value sites that the plan rounds.
    values: tuple[ValueRun, ...] = ()
    #: Anything a reader must know.
    notes: tuple[str, ...] = ()
    counters: RunCounters = field(default_factory=RunCounters)
    watch: OverflowWatch = field(default_factory=OverflowWatch)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.other_bytes + sum(site.bytes for site in self.sites)

    def groups(self) -> Mapping[tuple[str, str, str, str], tuple[int, int, int]]:
        """(role, scheme, kernel, reason) → sites, bytes in memory, bytes in the plan; by role, in the model's order."""
        found: dict[tuple[str, str, str, str], tuple[int, int, int]] = {}
        roles = list(dict.fromkeys(site.role for site in self.sites))
        for site in sorted(self.sites, key=lambda site: (roles.index(site.role), site.scheme)):
            key = site.role, site.scheme, site.kernel, site.reason
            count, num_bytes, plan_bytes = found.get(key, (0, 0, 0))
            found[key] = count + 1, num_bytes + site.bytes, plan_bytes + site.plan_bytes
        return found

    def table(self) -> str:
        """One line for each role, scheme and kernel, and below each reason once; needs no terminal."""
        rows = [("role", "scheme", "runs as", "sites", "bytes", "bytes in plan")]
        for (role, scheme, kernel, _), (count, num_bytes, plan_bytes) in self.groups().items():
            rows.append((role, scheme, kernel, str(count), f"{num_bytes:,}", f"{plan_bytes:,}"))
        lines = _in_columns(rows)
        lines += dict.fromkeys(f"{site.kernel}: {site.own_reason or site.reason}" for site in self.sites)
        passed_over: dict[str, dict[str, None]] = {}
        for site in self.sites:
            for reason in site.passed_over:
                passed_over.setdefault(reason, {})[site.scheme] = None
        lines += [f"{reason} ({', '.join(schemes)})" for reason, schemes in passed_over.items()]
        lines += self._value_lines()
        lines.append(f"computes in {spell_dtype(self.dtype)}: {self.dtype_reason}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _value_lines(self) -> list[str]:
        """One line for each role, scheme and kernel of values, and below each reason once."""
        if not self.values:
            return []
        counts = Counter((value.role, value.scheme, value.kernel) for value in self.values)
        rows = [("values", "scheme", "runs as", "sites"), *((*key, str(count)) for key, count in counts.items())]
        return [*_in_columns(rows), *dict.fromkeys(f"{value.kernel}: {value.reason}" for value in self.values)]


def emulated_report(plan: Plan, planned: nn.Module, sites: Sequence[Site]) -> RunReport:
    """How an emulated model runs: everything in fp32."""
    chosen = {choice.name: choice for choice in plan.sites}
    runs = []
    for site in sites:
        choice = chosen.get(site.name)
        num_bytes = site.num_weights * torch.float32.itemsize
        runs.append(
            SiteRun(
                name=site.name,
                role=site.role,
                scheme="as_loaded" if choice is None else choice.scheme,
                kernel="fp32",
                reason="the values of its codes, as hardware that has them would see them",
                bytes=num_bytes,
                plan_bytes=num_bytes if choice is None else choice.bytes,
            )
        )
    parameters = list(planned.parameters())
    total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return RunReport(
        mode="emulate",
        dtype=torch.float32,
        dtype_reason="emulation is exact",
        device_type=parameters[0].device.type,
        sites=tuple(runs),
        other_bytes=max(0, total - sum(run.bytes for run in runs)),
    )


def _in_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    return [
        cell.rjust(width) if column >= 3 else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
