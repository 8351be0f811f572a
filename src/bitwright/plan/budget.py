"""What the user limits, and what is made small within it.

Quality limits: ``max_kl`` (mean nats per token) and ``max_ppl_increase`` (a ratio: 0.01 = +1 %). Size limits:
``max_memory_bytes`` (all weights) and ``effective_bits`` (stored bits per decoder linear weight). The objective is the
axis that is not limited:

    a quality limit only   → "memory": the smallest model that keeps the quality
    a size limit, or both  → "kl": the best model that fits (spare bytes buy quality)
    no limit at all        → max_kl = 0.02 and "memory"

0.02 nats per token is a fiftieth of a nat: at most about 2 % of perplexity where the two move together, and several
times the KL of bf16 itself, so that it can be measured on a few thousand tokens.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

from pydantic import field_validator

from bitwright.errors import BudgetError
from bitwright.plan.canonical import Number
from bitwright.plan.schema import Record

Objective = Literal["memory", "kl"]

#: Nats per token; the limit that holds where the user gives none.
DEFAULT_MAX_KL = 0.02

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
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


class Budget(Record):
    """The user's limits; None means no limit.

    Raises ``BudgetError`` for a limit that is no finite number above zero, or more than 32 bits.
    """

    #: Mean KL(reference ‖ plan) on held-out text, nats per token.
    max_kl: Number | None = None
    #: Perplexity of the plan ÷ perplexity of the reference − 1.
    max_ppl_increase: Number | None = None
    #: Stored bytes of all weights.
    max_memory_bytes: Number | None = None
    #: Stored bits of the decoder's linear weights ÷ their number.
    effective_bits: Number | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _raise_if_no_limit(cls, value: Any, info: Any) -> Any:
        if value is None:
            return None
        name = info.field_name
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BudgetError(f"{name} must be a number, not {value!r}; leave it out for no limit")
        if not math.isfinite(value) or value <= 0:
            raise BudgetError(f"{name} must be a finite number above 0, not {value!r}; leave it out for no limit")
        if name == "effective_bits" and value > 32:
            raise BudgetError(f"effective_bits must be at most 32, not {value!r}; weights are never stored wider")
        return value

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: value for name, value in self.model_dump().items() if value is not None}

    @property
    def limits_quality(self) -> bool:
        return self.max_kl is not None or self.max_ppl_increase is not None

    @property
    def limits_size(self) -> bool:
        return self.max_memory_bytes is not None or self.effective_bits is not None


class SettledBudget(NamedTuple):
    """A budget with a limit in it, the objective, and why."""

    budget: Budget
    objective: Objective
    reason: str


def default_objective(budget: Budget) -> tuple[Objective, str]:
    """Return the objective that the limits imply, and the reason in one sentence."""
    if budget.limits_size and budget.limits_quality:
        return "kl", "size and quality are both limited: the best quality that fits, held against the quality limit"
    if budget.limits_size:
        return "kl", "the size is limited: the best quality that fits"
    return "memory", "the quality is limited: the smallest model that keeps it"


def settle_budget(budget: Budget, objective: str | None = None) -> SettledBudget:
    """Fill in what the user left open and refuse what contradicts itself.

    Raises ``BudgetError`` for an unknown objective, "memory" without a quality limit beside a size limit, and "kl"
    without a size limit (nothing would stop either from running to its end of the scale).
    """
    if objective not in (None, "memory", "kl"):
        raise BudgetError(f"unknown objective {objective!r}; choose 'memory' (smallest model) or 'kl' (best quality)")
    if not budget.limits and objective != "kl":
        return SettledBudget(
            Budget(max_kl=DEFAULT_MAX_KL),
            "memory",
            f"no limit was given: the smallest model within a KL of {DEFAULT_MAX_KL:g} nats per token",
        )
    if objective is None:
        return SettledBudget(budget, *default_objective(budget))
    if objective == "memory" and not budget.limits_quality:
        raise BudgetError(
            "the objective 'memory' with only a size limit contradicts itself: every site would take the fewest bits; "
            "add max_kl or max_ppl_increase, or choose the objective 'kl'"
        )
    if objective == "kl" and not budget.limits_size:
        raise BudgetError(
            "the objective 'kl' without a size limit contradicts itself: every site would take the most bits; "
            "add max_memory or effective_bits, or choose the objective 'memory'"
        )
    return SettledBudget(budget, "memory" if objective == "memory" else "kl", "asked for")


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
