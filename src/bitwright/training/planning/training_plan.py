"""From a model and a request to a training plan: one short run is looked at, and what it showed decides.

    products   the fastest recipe within the error that is allowed, layer by layer (`product_choice.py`)
    masters    fp32; bf16 with stochastic rounding only where nothing else fits the device
    the rest   fp32, with what was measured against fewer bits; between GPUs bf16 where that loses less than 1 %

What `prepare` runs for a plan is in `planned_policy.py`.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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
from bitwright.plan.training_plan import CandidatePolicy, MemoryNeed, TrainingPlan
from bitwright.search.progress import Progress
from bitwright.training.data.token_rows import read_token_rows
from bitwright.training.planning.observe import observe
from bitwright.training.planning.plan_sites import sites_of_a_step
from bitwright.training.planning.planned_policy import without_masters
from bitwright.training.planning.product_choice import MAX_ERROR, Offer, choose_product, offer_of, policy_of_most
from bitwright.training.policy import Policy
from bitwright.training.policy_bits import activation_setup, state_bits
from bitwright.training.products.sites import product_sites


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
    offer = offer_of(request.device, request.max_error)
    every = product_sites(loaded.model, offer.base)
    kept = {policy.name: product_sites(loaded.model, policy).high for policy in offer.candidates}
    seen = observe(
        loaded.model,
        (*every.low, *every.high),
        batches,
        {policy.name: policy.products for policy in offer.candidates if policy.products is not None},
        learning_rate=request.learning_rate,
        seed=request.seed,
        progress=progress,
    )
    sites = tuple(choose_product(product, every, kept, offer) for product in seen.products)
    policy, reason = policy_of_most(sites, offer)
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
        candidates=(*(CandidatePolicy(name=c.name, sites=used[c.name]) for c in offer.candidates), *offer.passed_over),
        memory=memory,
        notes=(*notes, *_notes(offer)),
        versions=_versions(),
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return plan.attach(Run(created=created, timings={"plan": time.perf_counter() - started}))


def _num_ids(model: Any) -> int:
    """How many token ids the model's embedding has; a tokenizer may give more."""
    return int(model.get_input_embeddings().num_embeddings)


# --- memory -----------------------------------------------------------------------------------------------------------


def _fitted(loaded: LoadedModel, policy: Policy, request: PlanRequest) -> tuple[Policy, MemoryNeed, tuple[str, ...]]:
    """The policy with or without fp32 masters, how it fits the device, and what there is to say of that."""
    shape = model_shape(loaded.model, name=loaded.name)
    without = without_masters(policy) if policy.compute == "bf16" else policy
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


def _notes(offer: Offer) -> tuple[str, ...]:
    delayed = [
        policy.name
        for policy in offer.candidates
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
