"""The least time of a step, whatever is chosen and however good the kernels are; and what lies between it and a plan.

    floor       all products at the fastest rate that the device has for any format, or all weights and caches in their
                fewest allowed bits, each byte once at peak bandwidth: whichever is slower (`hardware/latency.py`)
    reachable   the fastest allowed choice of every site, operation by operation, at the rates that times are predicted
                with: those that were measured where the device file has any, else its peaks

A limit below the floor is refused before any work, for nothing could keep it. One between the two is no contradiction
(better kernels than those measured could keep it), so the search goes on, and the plan says at which rates the limit is
missed.

What a step reads of a mixture of experts depends on its tokens: the floor counts each expert by the share of tokens
that it is expected to get, and so as much of the weights as a single token reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.errors import BudgetError
from bitwright.hardware import Device, roofline
from bitwright.hardware.latency import Floor, work_floor
from bitwright.models.value_sites import ValueSite
from bitwright.plan import QUALITY_LIMITS, Budget
from bitwright.search.candidate import Candidate
from bitwright.search.choices import Choices
from bitwright.search.limits import quantity_of, sum_of, value_of
from bitwright.search.price import AS_LOADED, AnySite, Prices
from bitwright.search.serving import RATES, product_operations


def raise_if_below_floor(prices: Prices, choices: Choices, budget: Budget) -> None:
    """Refuse a limit on time that lies below the roofline's floor: it needs no statistics to know that.

    Raises:
        BudgetError: the limit, the floor, and which figures of the device make it.
    """
    if prices.device is None:
        return
    least = floors(prices, choices)
    for name, limit in budget.limits.items():
        if name in QUALITY_LIMITS or quantity_of(name) not in least:
            continue
        floor = least[quantity_of(name)]
        if sum_of(name, limit, prices) < floor.seconds:
            at_best = value_of(name, floor.seconds, prices)
            raise BudgetError(
                f"{name} of {limit:g} is out of reach: the roofline's floor of a step is {floor.seconds:.4g} s "
                f"({floor.why}), whatever is chosen, so that {name} is {at_best:.4g} at best; ask for no more, allow "
                "schemes with fewer bits, or plan for a faster device"
            )


def floors(prices: Prices, choices: Choices) -> dict[str, Floor]:
    """Quantity of time → its floor; for prices with a device."""
    assert prices.device is not None
    workload = prices.workload
    weights = [site for site in prices.sites if site.role != "embedding"]
    moved_bytes = sum(
        prices.token_share.get(site.name, 1.0) * min(prices.site_bytes(site, c) for c in _options(site, choices))
        for site in weights
    )
    moved_bytes += sum(
        min(prices.amounts(site, c).get("device_bytes", 0.0) for c in _options(site, choices))
        for site in prices.value_sites
        if site.kind == "state"
    )
    found = {}
    for quantity, query_tokens in (("decode_s", 1), ("prefill_s", workload.prefill_tokens)):
        operations = sum(product_operations(site, workload, query_tokens) for site in prices.value_sites)
        for site in weights:
            # of a prompt's logits only the last are asked for
            tokens = workload.batch * (1 if site.role == "lm_head" else query_tokens)
            operations += 2.0 * tokens * prices.token_share.get(site.name, 1.0) * site.num_weights
        found[quantity] = work_floor(prices.device, flops=operations, moved_bytes=moved_bytes)
    return found


def missed_at_rates(prices: Prices, choices: Choices, budget: Budget, totals: Mapping[str, float]) -> list[str]:
    """A sentence for each limit on time that no choice keeps at the rates it is predicted with, and a plan misses.

    Args:
        prices, choices: of the model.
        budget: what was asked.
        totals: quantity → amount of the plan.
    """
    if prices.device is None:
        return []
    least = floors(prices, choices)
    notes = []
    for name, limit in budget.limits.items():
        quantity = None if name in QUALITY_LIMITS else quantity_of(name)
        if quantity not in least:
            continue
        asked = sum_of(name, limit, prices)
        fastest = sum(
            min(prices.amounts(site, c).get(quantity, 0.0) for c in _options(site, choices))
            for site in prices.all_sites
        )
        if totals[quantity] > asked and fastest > asked:
            notes.append(
                f"{name} of {limit:g} is not met at {_rates(prices.device)}: the fastest allowed choice of every site "
                f"comes to {value_of(name, fastest, prices):.4g}; only kernels nearer to the roofline's floor, "
                f"{value_of(name, least[quantity].seconds, prices):.4g}, could keep it"
            )
    return notes


def _rates(device: Device) -> str:
    bandwidth = f"{roofline.memory_gb_per_s(device, RATES):g} GB/s"
    if roofline.has_achieved_rates(device):
        return f"the rates that were measured on {device.name} ({bandwidth})"
    return f"the rates that are stated for {device.name} ({bandwidth}), operation by operation"


def _options(site: AnySite, choices: Choices) -> Sequence[Candidate]:
    """What a site can come to; a value site may stay as it is."""
    allowed = choices.candidates.get(site.name, ())
    return (*allowed, AS_LOADED) if isinstance(site, ValueSite) or not allowed else allowed
