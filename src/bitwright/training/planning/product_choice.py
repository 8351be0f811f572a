"""Which recipe each product of a plan gets: the fastest that the device multiplies natively, within an error.

A recipe's error is what its rounding does to one product: the relative error that nine of ten outputs stay within
(`observe_product.py`). Gradients of different batches differ from each other by their own size, so a few percent are
not seen; 10 % (`MAX_ERROR`) leaves FP8 in where tensors are well-behaved, and takes it out where one outlier pushes the
rest to zero. Roles that recipes leave alone, and layers whose sizes the matrix unit does not take, stay in the compute
format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.hardware import Device
from bitwright.plan.training_plan import CandidatePolicy, ProductErrors, TrainingSite
from bitwright.training.choose import choose_policy, why_not
from bitwright.training.planning.observe_product import ObservedProduct
from bitwright.training.planning.plan_sites import evidence_of
from bitwright.training.policy import POLICIES, Policy
from bitwright.training.products.sites import ProductSites

#: Relative error of a product up to which a recipe is taken, unless asked otherwise.
MAX_ERROR = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a device has for the products of linear layers."""

    device: Device
    max_error: float
    #: Policies with a recipe that it runs natively, the fastest first.
    candidates: tuple[Policy, ...]
    #: The other ones with a recipe, and why not.
    passed_over: tuple[CandidatePolicy, ...]
    #: The policy without a recipe that it runs best, and why.
    base: Policy
    base_reason: str


def offer_of(device: Device, max_error: float) -> Offer:
    """Return what a device has for products.

    Args:
        device: any.
        max_error: relative error of a product up to which a recipe is taken.
    """
    candidates, passed_over = _candidates(device)
    base, base_reason = _base(device)
    return Offer(
        device=device,
        max_error=max_error,
        candidates=candidates,
        passed_over=passed_over,
        base=base,
        base_reason=base_reason,
    )


def _candidates(device: Device) -> tuple[tuple[Policy, ...], tuple[CandidatePolicy, ...]]:
    """Policies with a recipe that the device runs natively, the fastest first; and the others, with why not."""
    found: list[Policy] = []
    others: list[CandidatePolicy] = []
    for policy in POLICIES.values():
        if policy.products is None:
            continue
        why = why_not(policy, device)
        if why is None:
            found.append(policy)
        else:
            others.append(CandidatePolicy(name=policy.name, why_not=why))
    found.sort(key=lambda policy: (-_rate_of(policy, device), -(policy.preference or 0), policy.name))
    return tuple(found), tuple(others)


def _rate_of(policy: Policy, device: Device) -> float:
    """The rate of a policy's slowest products on a device, TFLOP/s, dense peak; 0 where one is not native."""
    formats = policy.product_formats or (policy.compute,)
    return min(device.matmul_tflops.get(name, 0.0) for name in formats)


def _base(device: Device) -> tuple[Policy, str]:
    """The policy without a recipe that the device runs best, and why."""
    plain = [p for p in POLICIES.values() if p.products is None and p.preference is not None]
    runs = [policy for policy in plain if why_not(policy, device) is None]
    if not runs:
        return choose_policy(device).policy, f"{device.name} has no matrix unit for anything narrower than fp32"
    best = max(runs, key=lambda policy: policy.preference or 0)
    return best, f"{device.name} multiplies {best.compute} natively"


# --- products ---------------------------------------------------------------------------------------------------------


def choose_product(
    product: ObservedProduct, every: ProductSites, kept: Mapping[str, Mapping[str, str]], offer: Offer
) -> TrainingSite:
    """Return the site of one product, with what was chosen and why.

    Args:
        product: what a short run showed of it.
        every: linear modules of the model, under the policy without a recipe.
        kept: policy → module that its recipe leaves alone → why.
        offer: what the device has.
    """
    if product.name in every.high:  # an island whatever the policy is
        choice, reason = "fp32", every.high[product.name]
    else:
        against = {policy.name: _why_not(product, policy, kept[policy.name], offer) for policy in offer.candidates}
        choice, reason = _choose(product, against, offer)
    return TrainingSite(
        name=product.name,
        kind="matmul",
        role=every.low.get(product.name, "router"),
        choice=choice,
        reason=reason,
        shape=product.shape,
        ranges=evidence_of(product.operands),
        errors=tuple(
            ProductErrors(recipe=name, forward=found.forward, dgrad=found.dgrad, wgrad=found.wgrad)
            for name, found in product.errors.items()
        ),
    )


def _why_not(product: ObservedProduct, policy: Policy, kept: Mapping[str, str], offer: Offer) -> str | None:
    """What stands against a recipe at one product; None where nothing does."""
    if product.name in kept:
        return kept[product.name]
    sizes = _why_not_sizes(product.shape, policy, offer.device)
    if sizes is not None:
        return sizes
    error = product.errors[policy.name].largest
    return f"error {error:.1%}" if not error <= offer.max_error else None


def _choose(product: ObservedProduct, against: Mapping[str, str | None], offer: Offer) -> tuple[str, str]:
    """(choice, why) of one product: the first candidate that nothing stands against."""
    candidates, base = offer.candidates, offer.base
    chosen = next((policy for policy in candidates if against[policy.name] is None), None)
    before = candidates if chosen is None else candidates[: candidates.index(chosen)]
    told = "; ".join(f"{policy.name}: {against[policy.name]}" for policy in before)
    if chosen is not None:
        rate = _rate_of(chosen, offer.device) / _rate_of(base, offer.device)
        error = product.errors[chosen.name].largest
        passed = f"; passed over: {told}" if told else ""
        return chosen.name, f"{rate:.3g} times the rate of {base.compute}, error {error:.1%}{passed}"
    reasons = set(against.values())
    if not candidates:
        return base.compute, f"{offer.device.name} multiplies nothing narrower in training"
    if len(reasons) == 1:
        return base.compute, f"every recipe leaves it alone: {reasons.pop()}"
    return base.compute, f"no recipe stays within {offer.max_error:.0%}: {told}"


def _why_not_sizes(shape: tuple[int, int], policy: Policy, device: Device) -> str | None:
    """Why the device's matrix unit does not take a layer's sizes in all three products."""
    rows, columns = shape
    for rule in device.matmul_rules:
        if not set(policy.product_formats) & set(rule.formats) or rule.group_size is not None:
            continue
        for size in (rows, columns):
            # each is summed over in one of the products, and an output in another
            if size % rule.in_features_multiple or size % rule.out_features_multiple:
                needed = max(rule.in_features_multiple, rule.out_features_multiple)
                return f"its side of {size} is no multiple of {needed}"
    return None


def policy_of_most(sites: Sequence[TrainingSite], offer: Offer) -> tuple[Policy, str]:
    """Return the policy that most weights are under, and why."""
    weights: Counter[str] = Counter()
    for site in sites:
        rows, columns = site.shape or (0, 0)
        weights[site.choice] += rows * columns
    low = [(weights[policy.name], policy.name) for policy in offer.candidates if weights[policy.name]]
    if not low:
        return offer.base, offer.base_reason
    number, name = max(low)
    share = number / sum(weights.values())
    return POLICIES[
        name
    ], f"{share:.0%} of the weights of linear layers are multiplied under its recipe; {offer.base_reason}"
