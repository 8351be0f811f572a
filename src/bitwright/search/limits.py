"""From the budget's limits to quantities that add up over sites, and back to figures a reader knows.

    max_memory_bytes       Σ weight_bytes
    device_memory_bytes    Σ device_bytes
    effective_bits         8 · Σ decoder_bytes ÷ decoder weights
    nominal_bits           Σ nominal_bits ÷ decoder weights
    latency_sla_s          Σ decode_s                               seconds of one decode step
    min_tokens_per_s       batch ÷ Σ decode_s
    prefill_sla_s          Σ prefill_s
    max_overflow_risk      Σ overflow                               expected events per million values

Quality limits go through the correction of totals. Log perplexity is taken to grow about as fast as KL, until
measurements say otherwise:

    max_kl                 KL of the plan
    max_ppl_increase       exp(KL) − 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bitwright.plan import QUALITY_LIMITS, Budget, Limit
from bitwright.search.price import Prices

#: Limits that are held against predictions, since nothing is run on the plan's hardware here: times, and bytes on the
#: device, of which activations and the runtime's workspace are estimates.
_PREDICTED = frozenset({"latency_sla_s", "min_tokens_per_s", "prefill_sla_s", "device_memory_bytes"})
#: What "memory" and "latency" make small.
_OBJECTIVES = {"memory": "weight_bytes", "latency": "decode_s", "kl": "kl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """How one limit of the budget reads as a quantity."""

    quantity: str
    #: (limit, prices) → largest sum of the quantity; and the sum → value, which is the same the other way round.
    to_sum: Callable[[float, Prices], float] = lambda value, _: value
    to_value: Callable[[float, Prices], float] = lambda total, _: total


_RULES: Mapping[str, _Rule] = {
    "max_memory_bytes": _Rule(quantity="weight_bytes"),
    "device_memory_bytes": _Rule(quantity="device_bytes"),
    "effective_bits": _Rule(
        quantity="decoder_bytes",
        to_sum=lambda bits, prices: bits * prices.num_decoder_weights / 8,
        to_value=lambda total, prices: 8 * total / max(1, prices.num_decoder_weights),
    ),
    "nominal_bits": _Rule(
        quantity="nominal_bits",
        to_sum=lambda bits, prices: bits * prices.num_decoder_weights,
        to_value=lambda total, prices: total / max(1, prices.num_decoder_weights),
    ),
    "latency_sla_s": _Rule(quantity="decode_s"),
    "min_tokens_per_s": _Rule(
        quantity="decode_s",
        to_sum=lambda rate, prices: prices.workload.batch / rate,
        to_value=lambda total, prices: prices.workload.batch / total if total > 0 else float("inf"),
    ),
    "prefill_sla_s": _Rule(quantity="prefill_s"),
    "max_overflow_risk": _Rule(quantity="overflow"),
}


def quality_target(budget: Budget) -> float | None:
    """The mean KL at which every quality limit is just kept; None where quality is not limited."""
    limits = [budget.max_kl] if budget.max_kl is not None else []
    if budget.max_ppl_increase is not None:
        limits.append(math.log1p(budget.max_ppl_increase))
    return min(limits, default=None)


def quality_value(name: str, kl: float) -> float:
    """The figure of a quality limit at a mean KL."""
    return math.expm1(kl) if name == "max_ppl_increase" else kl


def quantity_of(name: str) -> str:
    """The quantity that the limit called `name` is about."""
    return _RULES[name].quantity


def sum_of(name: str, limit: float, prices: Prices) -> float:
    """The largest sum of the limit's quantity that keeps it."""
    return _RULES[name].to_sum(limit, prices)


def value_of(name: str, total: float, prices: Prices) -> float:
    """The limit's figure at a sum of its quantity."""
    return _RULES[name].to_value(total, prices)


def largest_sums(budget: Budget, prices: Prices) -> dict[str, float]:
    """Quantity → the largest sum over the whole model that keeps every limit of the budget but those on quality."""
    sums: dict[str, float] = {}
    for name, limit in budget.limits.items():
        if name not in QUALITY_LIMITS:
            quantity = quantity_of(name)
            sums[quantity] = min(sums.get(quantity, float("inf")), sum_of(name, limit, prices))
    return sums


def objective_quantity(objective: str, prices: Prices) -> str:
    """What the solver makes small; with a context, memory is all that has to fit on the device."""
    quantity = _OBJECTIVES[objective]
    return "device_bytes" if quantity == "weight_bytes" and prices.workload.context is not None else quantity


def cost_quantity(objective: str, budget: Budget, prices: Prices) -> str:
    """What better quality is paid with: the objective, or what the budget limits where the objective is quality."""
    quantity = objective_quantity(objective, prices)
    if quantity != "kl":
        return quantity
    return next(iter(largest_sums(budget, prices)), "weight_bytes")


def is_lower(name: str) -> bool:
    """Whether a limit is a lower one."""
    return name.startswith("min_")


def judge(limits: Mapping[str, float], values: Mapping[str, float]) -> tuple[Limit, ...]:
    """Every limit beside its value: met by measurement, by prediction where nothing else can be had, or missed.

    Bytes of weights are counted exactly, which is measuring them; what else must fit on a device is predicted.
    """
    found = []
    for name, limit in limits.items():
        kept = values[name] >= limit if is_lower(name) else values[name] <= limit
        status = "missed" if not kept else "predicted" if name in _PREDICTED else "measured"
        found.append(Limit(name=name, limit=limit, value=values[name], status=status))  # type: ignore[arg-type]
    return tuple(found)
