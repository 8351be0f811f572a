"""From what a short run showed to a training plan, and from a plan to what `prepare` runs.

    products   the fastest recipe that the device multiplies natively and whose error at this very layer is within
               `max_error`; roles that recipes leave alone, and layers whose sizes the matrix unit does not take,
               stay in the compute format
    masters    fp32; bf16 with stochastic rounding only where nothing else fits the device
    the rest   fp32, with what was measured against fewer bits; between GPUs bf16 where that loses less than 1 %

A recipe's error is what its rounding does to one product: the relative error that nine of ten outputs stay within.
Gradients of different batches differ from each other by their own size, so a few percent are not seen; 10 %
(`max_error`) leaves FP8 in where tensors are well-behaved, and takes it out where one outlier pushes the rest to zero.

`policy_of_plan` gives back a `Policy` for everything but the products, and for these the recipe of each layer.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

from bitwright.errors import TrainingError
from bitwright.hardware import Device
from bitwright.hardware.memory import Sharding, TrainingMemory, training_memory
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.models.shape import model_shape
from bitwright.plan.schema import ModelInfo, Run, TextInfo
from bitwright.plan.training_plan import (
    CandidatePolicy,
    MemoryNeed,
    ProductErrors,
    TrainingPlan,
    TrainingSite,
)
from bitwright.search.progress import Progress
from bitwright.training.choose import choose_policy, why_not
from bitwright.training.data.token_rows import read_token_rows
from bitwright.training.planning.observe import Observation, ObservedProduct, observe
from bitwright.training.planning.plan_sites import evidence_of, sites_of_a_step
from bitwright.training.policy import POLICIES, Policy
from bitwright.training.policy_bits import activation_setup, state_bits
from bitwright.training.product_recipe import ProductRecipe
from bitwright.training.products.sites import ProductSites, product_sites

#: Relative error of a product up to which a recipe is taken, unless asked otherwise.
MAX_ERROR = 0.1
#: Update rule of a plan that cannot hold fp32 masters.
_WITHOUT_MASTERS = {"parameters": "bf16", "update": "stochastic"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a training plan is asked for.

    Raises:
        TrainingError: a number that cannot be.
    """

    device: Device
    device_reason: str = "asked for"
    gpus: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    max_error: float = MAX_ERROR
    #: What is read, and how much of it: `batches` of `batch` rows of `sequence` tokens.
    text: str = "docs"
    batches: int = 3
    batch: int = 2
    sequence: int = 256
    #: What one GPU is to run at once, for its memory.
    gpu_batch: int = 1
    gpu_sequence: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.max_error > 0:
            raise TrainingError(f"max_error is {self.max_error}; a relative error is above 0, such as {MAX_ERROR}")
        if not self.learning_rate > 0:
            raise TrainingError(f"a learning rate of {self.learning_rate}; give one above 0, such as 1e-4")
        if self.gpus < 1:
            raise TrainingError(f"{self.gpus} GPUs; give at least one")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPolicy:
    """What a plan comes to: a policy for everything, and the recipe of each product."""

    policy: Policy
    reason: str
    #: Module → the recipe of its products.
    recipes: Mapping[str, ProductRecipe]
    #: Module whose product stays in the policy's compute format → why.
    high: Mapping[str, str]
    #: Module with a recipe → its role.
    roles: Mapping[str, str]

    @property
    def by_recipe(self) -> tuple[tuple[ProductRecipe, Mapping[str, str]], ...]:
        """Every recipe with its modules (name → role)."""
        grouped: dict[ProductRecipe, dict[str, str]] = {}
        for name, recipe in self.recipes.items():
            grouped.setdefault(recipe, {})[name] = self.roles[name]
        return tuple(grouped.items())


def make_training_plan(
    model: str | Path | LoadedModel, request: PlanRequest, *, progress: Progress | None = None
) -> TrainingPlan:
    """Run a model for a few batches, and choose the precision of its training.

    Args:
        model: what `models.load` takes, or what it gave.
        request: hardware, text, limits.
        progress: shown to the user.

    Raises:
        ModelError: the model cannot be read, or is no decoder.
        DataError: the text cannot be read.
        TrainingError: the run has no finite loss.
    """
    started = time.perf_counter()
    loaded = model if isinstance(model, LoadedModel) else load(model)
    rows = read_token_rows(
        request.text,
        loaded.tokenizer,
        sequence_length=request.sequence,
        vocabulary_size=_num_ids(loaded.model),
        max_rows=request.batches * request.batch,
    )
    ids, labels = rows.input_ids.long(), rows.labels.long()
    batches: list[Mapping[str, Tensor]] = [
        {"input_ids": ids[first : first + request.batch], "labels": labels[first : first + request.batch]}
        for first in range(0, len(ids), request.batch)
    ]
    candidates, passed_over = _candidates(request.device)
    base, base_reason = _base(request.device)
    every = product_sites(loaded.model, base)
    kept = {policy.name: product_sites(loaded.model, policy).high for policy in candidates}
    seen = observe(
        loaded.model,
        (*every.low, *every.high),
        batches,
        {policy.name: policy.products for policy in candidates if policy.products is not None},
        learning_rate=request.learning_rate,
        seed=request.seed,
        progress=progress,
    )
    sites = tuple(_product_site(product, every, kept, candidates, base, request) for product in seen.products)
    policy, reason = _policy(sites, candidates, base, base_reason)
    policy, memory, notes = _fitted(loaded, policy, request)
    text = TextInfo(source=rows.source, tokens=rows.num_scored, sequences=rows.num_rows, hash=rows.hash)
    used = Counter(site.choice for site in sites)
    plan = TrainingPlan(
        model=ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters, notes=loaded.notes),
        hardware=request.device.name,
        hardware_reason=request.device_reason,
        gpus=request.gpus,
        policy=policy.name,
        policy_reason=reason,
        optimizer=request.optimizer,
        learning_rate=request.learning_rate,
        max_error=request.max_error,
        seed=request.seed,
        text=text,
        loss=seen.loss,
        sites=(*sites, *sites_of_a_step(seen, policy, request.gpus, request.learning_rate)),
        candidates=(*(CandidatePolicy(name=c.name, sites=used[c.name]) for c in candidates), *passed_over),
        memory=memory,
        notes=(*notes, *_notes(seen, candidates)),
        versions=_versions(),
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return plan.attach(Run(created=created, timings={"plan": time.perf_counter() - started}))


def _num_ids(model: Any) -> int:
    """How many token ids the model's embedding has; a tokenizer may give more."""
    return int(model.get_input_embeddings().num_embeddings)


def policy_of_plan(plan: TrainingPlan) -> PlannedPolicy:
    """Return what `prepare` runs for a plan.

    Raises:
        UnknownName: the plan names a policy that is not there any more.
    """
    policy = POLICIES[plan.policy]
    master = plan.site("masters")
    if master.choice == "bf16":
        policy = replace(policy, **_WITHOUT_MASTERS)  # type: ignore[arg-type]
    recipes: dict[str, ProductRecipe] = {}
    high: dict[str, str] = {}
    roles: dict[str, str] = {}
    for site in plan.products:
        named = POLICIES[site.choice].products if site.choice in POLICIES else None
        if named is None:
            high[site.name] = site.reason
        else:
            recipes[site.name], roles[site.name] = named, site.role
    return PlannedPolicy(policy=policy, reason=plan.policy_reason, recipes=recipes, high=high, roles=roles)


# --- which recipes are in question ------------------------------------------------------------------------------------


def _candidates(device: Device) -> tuple[list[Policy], tuple[CandidatePolicy, ...]]:
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
    found.sort(key=lambda policy: (-rate_of(policy, device), -(policy.preference or 0), policy.name))
    return found, tuple(others)


def rate_of(policy: Policy, device: Device) -> float:
    """Return the rate of a policy's slowest products on a device, TFLOP/s, dense peak; 0 where one is not native."""
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


def _product_site(
    product: ObservedProduct,
    every: ProductSites,
    kept: Mapping[str, Mapping[str, str]],
    candidates: Sequence[Policy],
    base: Policy,
    request: PlanRequest,
) -> TrainingSite:
    if product.name in every.high:  # an island whatever the policy is
        choice, reason = "fp32", every.high[product.name]
    else:
        against = {policy.name: _why_not(product, policy, kept[policy.name], request) for policy in candidates}
        choice, reason = _choose(product, against, candidates, base, request)
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


def _why_not(product: ObservedProduct, policy: Policy, kept: Mapping[str, str], request: PlanRequest) -> str | None:
    """What stands against a recipe at one product; None where nothing does."""
    if product.name in kept:
        return kept[product.name]
    sizes = _why_not_sizes(product.shape, policy, request.device)
    if sizes is not None:
        return sizes
    error = product.errors[policy.name].largest
    return f"error {error:.1%}" if not error <= request.max_error else None


def _choose(
    product: ObservedProduct,
    against: Mapping[str, str | None],
    candidates: Sequence[Policy],
    base: Policy,
    request: PlanRequest,
) -> tuple[str, str]:
    """(choice, why) of one product: the first candidate that nothing stands against."""
    chosen = next((policy for policy in candidates if against[policy.name] is None), None)
    before = candidates if chosen is None else candidates[: candidates.index(chosen)]
    told = "; ".join(f"{policy.name}: {against[policy.name]}" for policy in before)
    if chosen is not None:
        rate = rate_of(chosen, request.device) / rate_of(base, request.device)
        error = product.errors[chosen.name].largest
        passed = f"; passed over: {told}" if told else ""
        return chosen.name, f"{rate:.3g} times the rate of {base.compute}, error {error:.1%}{passed}"
    reasons = set(against.values())
    if not candidates:
        return base.compute, f"{request.device.name} multiplies nothing narrower in training"
    if len(reasons) == 1:
        return base.compute, f"every recipe leaves it alone: {reasons.pop()}"
    return base.compute, f"no recipe stays within {request.max_error:.0%}: {told}"


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


def _policy(
    sites: Sequence[TrainingSite], candidates: Sequence[Policy], base: Policy, base_reason: str
) -> tuple[Policy, str]:
    """The policy that most weights are under, and why."""
    weights: Counter[str] = Counter()
    for site in sites:
        rows, columns = site.shape or (0, 0)
        weights[site.choice] += rows * columns
    low = [(weights[policy.name], policy.name) for policy in candidates if weights[policy.name]]
    if not low:
        return base, base_reason
    number, name = max(low)
    share = number / sum(weights.values())
    return POLICIES[name], f"{share:.0%} of the weights of linear layers are multiplied under its recipe; {base_reason}"


# --- memory -----------------------------------------------------------------------------------------------------------


def _fitted(loaded: LoadedModel, policy: Policy, request: PlanRequest) -> tuple[Policy, MemoryNeed, tuple[str, ...]]:
    """The policy with or without fp32 masters, how it fits the device, and what there is to say of that."""
    shape = model_shape(loaded.model, name=loaded.name)
    without = replace(policy, **_WITHOUT_MASTERS) if policy.compute == "bf16" else policy  # type: ignore[arg-type]
    best: tuple[TrainingMemory, int, str] | None = None
    for attempt in (policy, without):
        states = state_bits(attempt, optimizer=request.optimizer)
        for zero in (0, 1, 2, 3) if request.gpus > 1 else (0,):
            for recompute in ("none", "full"):
                setup = activation_setup(
                    attempt, batch=request.gpu_batch, sequence=request.gpu_sequence, recompute=recompute
                )
                sharding = Sharding(num_gpus=request.gpus, zero=zero)
                found = training_memory(shape, states, setup, sharding=sharding, kind=request.device.kind)
                if best is None or found.peak < best[0].peak:
                    best = found, zero, recompute
                if found.peak <= request.device.memory_bytes:
                    return attempt, _need(found, zero, recompute, request), ()
    assert best is not None
    short = best[0].peak - request.device.memory_bytes
    note = (
        f"does not fit: one {request.device.name} is {short / 1e9:.3g} GB short even with what saves most (ZeRO "
        f"{best[1]}, recompute {best[2]}); use more GPUs, or adapters (bitwright memory {loaded.name} --lora-rank 16)"
    )
    return policy, _need(*best, request), (note,)


def _need(found: TrainingMemory, zero: int, recompute: str, request: PlanRequest) -> MemoryNeed:
    return MemoryNeed(
        peak_bytes=found.peak,
        device_bytes=request.device.memory_bytes,
        batch=request.gpu_batch,
        sequence=request.gpu_sequence,
        zero=zero,
        recompute="full" if recompute == "full" else "none",
    )


def _notes(seen: Observation, candidates: Sequence[Policy]) -> tuple[str, ...]:
    delayed = [
        policy.name
        for policy in candidates
        if policy.products is not None and any(rule.delay for rule in policy.products.operands.values())
    ]
    if not delayed:
        return ()
    return (
        f"errors of {', '.join(delayed)} are under scales of the tensors at hand; delayed scales clip where a tensor "
        "outgrows its history",
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("bitwright", "torch", "numpy", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found
