"""What the user limits, and what is made small within it.

    quality    max_kl (mean nats per token), max_ppl_increase (a ratio: 0.01 = +1 %)
    size       max_memory_bytes (all weights), effective_bits and nominal_bits (per decoder linear weight, with and
               without scales), device_memory_bytes (weights, KV cache, activations and workspace: all that must fit)
    time       latency_sla_s (one decode step: the time between two tokens of a sequence), min_tokens_per_s (tokens of
               all sequences of the batch together), prefill_sla_s (reading the prompts)
    stability  max_overflow_risk (expected values beyond a format's range, before they are cast, per million values)

Any mix of them holds together. The objective is the axis that is not limited:

    quality limits only      → "memory": the smallest model that keeps the quality
    any other limit, or both → "kl": the best model that fits (spare bytes and time buy quality)
    no limit at all          → max_kl = 0.02 and "memory"

"latency" is chosen by asking for it. 0.02 nats per token is a fiftieth of a nat: at most about 2 % of perplexity where
the two move together, and several times the KL of bf16 itself, so that it can be measured on a few thousand tokens.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple, cast, get_args

from pydantic import field_validator

from bitwright.errors import BudgetError
from bitwright.plan.canonical import Number
from bitwright.plan.schema import Record
from bitwright.plan.workload import Workload

Objective = Literal["memory", "kl", "latency"]

#: Nats per token; the limit that holds where the user gives none.
DEFAULT_MAX_KL = 0.02

#: Limits that are held against measurements.
QUALITY_LIMITS = frozenset({"max_kl", "max_ppl_increase"})
_TIME_LIMITS = frozenset({"latency_sla_s", "min_tokens_per_s", "prefill_sla_s"})
#: What all other limits are about.
_AXES = {
    "the size": frozenset({"max_memory_bytes", "effective_bits", "nominal_bits", "device_memory_bytes"}),
    "the time": _TIME_LIMITS,
    "the overflow risk": frozenset({"max_overflow_risk"}),
}

_UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_UNIT_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµ%]*)\s*")


class Budget(Record):
    """The user's limits; None means no limit. What begins with ``min_`` is a lower limit, all others are upper ones.

    Raises ``BudgetError`` for a limit that is no finite number above zero (only `max_overflow_risk` may be zero), or
    more than 32 bits.
    """

    #: Mean KL(reference ‖ plan) on held-out text, nats per token.
    max_kl: Number | None = None
    #: Perplexity of the plan ÷ perplexity of the reference − 1.
    max_ppl_increase: Number | None = None
    #: Stored bytes of all weights.
    max_memory_bytes: Number | None = None
    #: Stored bits of the decoder's linear weights ÷ their number.
    effective_bits: Number | None = None
    #: The same without scales and zero points.
    nominal_bits: Number | None = None
    #: Bytes of weights, KV cache, activations and workspace under the plan's workload.
    device_memory_bytes: Number | None = None
    #: Seconds of one decode step under the plan's workload.
    latency_sla_s: Number | None = None
    #: Tokens per second that all sequences of the batch gain together in decoding.
    min_tokens_per_s: Number | None = None
    #: Seconds to read the prompts of the plan's workload.
    prefill_sla_s: Number | None = None
    #: Expected values beyond a format's range, before they are cast, per million values.
    max_overflow_risk: Number | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _raise_if_no_limit(cls, value: Any, info: Any) -> Any:
        if value is None:
            return None
        name = info.field_name
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BudgetError(f"{name} must be a number, not {value!r}; leave it out for no limit")
        may_be_zero = name == "max_overflow_risk"
        if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            rule = "a finite number of at least 0" if may_be_zero else "a finite number above 0"
            raise BudgetError(f"{name} must be {rule}, not {value!r}; leave it out for no limit")
        if name in ("effective_bits", "nominal_bits") and value > 32:
            raise BudgetError(f"{name} must be at most 32, not {value!r}; weights are never stored wider")
        return value

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    @property
    def limits_quality(self) -> bool:
        return self.max_kl is not None or self.max_ppl_increase is not None

    @property
    def limits_resources(self) -> bool:
        """Whether anything but quality is limited: size, time or stability."""
        return bool(self.limits.keys() - QUALITY_LIMITS)


class SettledBudget(NamedTuple):
    """A budget with a limit in it, the objective, and why."""

    budget: Budget
    objective: Objective
    reason: str


def default_objective(budget: Budget) -> tuple[Objective, str]:
    """Return the objective that the limits imply, and the reason in one sentence."""
    limited = _limited_axes(budget)
    what = " and ".join(limited) + (" is" if len(limited) == 1 else " are") + " limited"
    if budget.limits_resources and budget.limits_quality:
        return "kl", f"{what}, and so is the quality: the best quality that fits, held against the quality limit"
    if budget.limits_resources:
        return "kl", f"{what}: the best quality that fits"
    return "memory", "the quality is limited: the smallest model that keeps it"


def _limited_axes(budget: Budget) -> list[str]:
    """What the resource limits are about, in plain words."""
    return [title for title, names in _AXES.items() if budget.limits.keys() & names]


def settle_budget(budget: Budget, objective: str | None = None, workload: Workload | None = None) -> SettledBudget:
    """Fill in what the user left open and refuse what contradicts itself.

    Raises ``BudgetError`` for an unknown objective, for "memory" or "latency" without a quality limit beside another
    limit, for "kl" without a limit on anything else (nothing would stop them from running to the end of the scale),
    and for device memory without a context.
    """
    workload = workload if workload is not None else Workload()
    if objective is not None and objective not in get_args(Objective):
        raise BudgetError(
            f"unknown objective {objective!r}; choose 'memory' (smallest model), 'kl' (best quality) or 'latency' "
            "(fastest decoding)"
        )
    _raise_if_contradictory(budget, workload)
    if not budget.limits and objective != "kl":
        aim = "fastest" if objective == "latency" else "smallest"
        return SettledBudget(
            Budget(max_kl=DEFAULT_MAX_KL),
            cast(Objective, objective or "memory"),
            f"no limit was given: the {aim} model within a KL of {DEFAULT_MAX_KL:g} nats",
        )
    if objective is None:
        return SettledBudget(budget, *default_objective(budget))
    if objective != "kl" and not budget.limits_quality:
        what = "the fewest bits" if objective == "memory" else "the fastest choice"
        raise BudgetError(
            f"the objective {objective!r} without a quality limit contradicts itself: every site would take {what}; "
            "add max_kl or max_ppl_increase, or choose the objective 'kl'"
        )
    if objective == "kl" and not budget.limits_resources:
        raise BudgetError(
            "the objective 'kl' without a limit on size, time or stability contradicts itself: every site would take "
            "the most bits; add max_memory or effective_bits, or choose the objective 'memory'"
        )
    return SettledBudget(budget, cast(Objective, objective), "asked for")


def _raise_if_contradictory(budget: Budget, workload: Workload) -> None:
    if budget.device_memory_bytes is not None and workload.context is None:
        raise BudgetError(
            "device_memory without a context says nothing: the KV cache grows with it; add context (tokens kept per "
            "sequence), or limit the weights alone with max_memory"
        )


def parse_bytes(text: str) -> float:
    """Return the bytes in ``"90MiB"``, ``"1.5 GB"`` or ``"94371840"`` (KiB = 2¹⁰ bytes, kB = 10³; case is free).

    Raises ``BudgetError`` for anything else, also for "90M", which leaves open whether MB or MiB is meant.
    """
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit and unit not in _UNIT_BYTES):
        advice = "write it like 90MiB, 1.5GB or 94371840"
        if match is not None and unit in ("k", "m", "g", "t"):
            prefix = unit.upper()
            advice = f"write {match[1]}{prefix}B (powers of 1000) or {match[1]}{prefix}iB (powers of 1024)"
        raise BudgetError(f"{text!r} is no size in bytes; {advice}")
    value = float(match[1]) * _UNIT_BYTES.get(unit, 1)
    if not math.isfinite(value) or value <= 0:
        raise BudgetError(f"{text!r} is no size in bytes: it must be finite and above 0; write it like 90MiB")
    return value


def parse_seconds(text: str) -> float:
    """Return the seconds in ``"20ms"``, ``"1.5 s"``, ``"800us"`` or ``"0.02"``.

    Raises ``BudgetError`` for anything else.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNIT_SECONDS:
        raise BudgetError(f"{text!r} is no time; write it like 20ms, 1.5s or 0.02 (seconds)")
    value = float(match[1]) * _UNIT_SECONDS[match[2]]
    if not math.isfinite(value) or value <= 0:
        raise BudgetError(f"{text!r} is no time: it must be finite and above 0; write it like 20ms")
    return value


def parse_ratio(text: str) -> float:
    """Return the ratio in ``"1%"`` (0.01) or ``"0.01"``.

    Raises ``BudgetError`` for anything else, also for a bare number of 1 or more ("1.5" could be meant as +1.5 %,
    +50 % or +150 %).
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in ("", "%"):
        raise BudgetError(f"{text!r} is no ratio; write it like 1% or 0.01")
    number = float(match[1])
    if match[2] == "%":
        return number / 100
    if number >= 1:
        raise BudgetError(
            f"{text!r} is ambiguous as an increase; write {number:g}% for that many percent, or 0.01 for 1%"
        )
    return number
