"""The door: a model and its optimizer, made ready to train under a policy.

    run = prepare(model, optimizer, policy="auto")
    for batch in batches:
        with run.step() as step:
            step.backward(model(**batch).loss)

Everything that can be refused is refused before anything is changed: the policy's name, what the device lacks, what
parameters and optimizer are. Then, in this order: routers and what makes positions run in fp32, linear layers multiply
codes where the policy says so, tables of positions that were cast are computed anew, parameters get their formats, and
gradients of narrow ones theirs. The model stays the object that it is, with the same names in its state_dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from bitwright import hardware
from bitwright.errors import TrainingError
from bitwright.hardware import Device
from bitwright.training.asked_policy import AskedPolicy, GivenPolicy, ask_policy
from bitwright.training.choose import Chosen, device_at, raise_if_not_native, why_not
from bitwright.training.custody import Custody, raise_if_under_a_run
from bitwright.training.forward import named_islands
from bitwright.training.forward.forward_region import AUTOCAST_DTYPES
from bitwright.training.forward.operations import MATRIX_UNITS
from bitwright.training.gradient_storage import keep_gradients_fp32
from bitwright.training.held_parameters import (
    cast_parameters,
    raise_if_no_model_or_optimizer,
    raise_if_unfit,
    unheld_parameters,
)
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.update import UPDATES
from bitwright.training.parameter_watch import say_unheld
from bitwright.training.policy import AUTO, Policy
from bitwright.training.processes.ranks import Ranks, unwrapped
from bitwright.training.processes.replicated import Replicated
from bitwright.training.products.policy_layers import Assignment, PolicyLayers, install_layers
from bitwright.training.products.sites import product_sites
from bitwright.training.run import TrainingRun
from bitwright.training.run_settings import Removable, RunSettings, Scheduler, raise_if_no_scheduler, raise_if_no_switch
from bitwright.training.step import StepResult

#: Skipped steps in a row that end a run, unless asked otherwise. A loss scale of 2³² is at its floor after 32.
PATIENCE = 200


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    policy: GivenPolicy = AUTO,
    device: str | Device | None = None,
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    scheduler: Scheduler | None = None,
    seed: int = 0,
    emulate: bool | None = None,
    patience: int = PATIENCE,
    count_swallowed: bool = False,
    count_lost: bool = False,
    monitor: Callable[[StepResult], None] | None = None,
) -> TrainingRun:
    """Make a model ready to train under a policy.

    Args:
        model: on its device, its trained parameters in fp32 (bf16 under a bf16-pure policy); wrapped for many ranks or
            not.
        optimizer: made from the model's parameters. It is stepped by the run, never by the caller.
        policy: a name of `bitwright train policies` or an alias; "auto": by what the device runs natively; a `Policy`;
            a training plan, or its folder.
        device: name of `bitwright hardware`, or its facts, where it is not to be recognised.
        accumulate: micro-batches that make a step; the step's gradient is the mean of theirs.
        max_grad_norm: gradients are clipped to this length; None: never.
        scheduler: of the learning rate; the run steps it after every update, and not after a skipped step.
        seed: of everything that a policy draws, in [0, 2^64).
        emulate: True: round operands as formats would that the device lacks; False: never do so. None: only on a CPU.
        patience: skipped steps in a row that end the run with an error.
        count_swallowed: count updates that rounding swallows (`run.swallowed`); reads every parameter once more.
        count_lost: count operands of low-precision products that rounding flushes or saturates
            (`run.products.counters()`); reads every operand once more.
        monitor: called with each step's result, while its (unscaled) gradients are still in `.grad`.

    Returns:
        The run: `step`, `last`, `counters`, `describe`, `state_dict`.

    Raises:
        UnknownName: no policy or device has that name.
        TrainingError: the device cannot, or model and optimizer are not what the policy needs. Nothing has changed
        then.
    """
    settings = RunSettings(
        accumulate=accumulate,
        max_grad_norm=max_grad_norm,
        patience=patience,
        seed=seed,
        count_swallowed=count_swallowed,
        count_lost=count_lost,
        monitor=monitor,
    )
    raise_if_no_switch(emulate)
    raise_if_no_model_or_optimizer(model, optimizer)
    place = _place_of(model)
    facts, recognised = _facts(device, place)
    asked = ask_policy(policy, facts)
    notes = [f"device: {facts.name} ({recognised})", *_say_emulated(asked.policy, facts, emulate)]
    emulates = _emulates_compute(asked.policy, facts, place)
    if emulates:
        notes.append(
            f"products of matrices, attention's too, and convolutions round their operands to {asked.policy.compute}, "
            "forward and back; recurrent layers multiply in fp32"
        )
    _raise_if_no_autocast(asked.policy, place)
    raise_if_under_a_run(model, optimizer)
    raise_if_unfit(model, optimizer, asked.policy)
    if scheduler is not None:
        raise_if_no_scheduler(scheduler, optimizer)
    unheld = unheld_parameters(model, optimizer)
    if unheld:
        notes.append(say_unheld(unheld))
    inner, ranks = unwrapped(model), Ranks.of_process_group()
    if isinstance(model, Replicated):
        notes.append("gradients are averaged over ranks in fp32, once a backward pass is over (DDP would round them)")
    with _undone_on_error() as changes:
        islands: tuple[named_islands.NamedIsland, ...] = ()
        if asked.policy.compute in AUTOCAST_DTYPES:
            installed = named_islands.install(inner)
            islands = installed.islands
            changes.append(installed)
        products = _products(inner, asked, place, settings, ranks, bool(emulate))
        if products is not None:
            changes.append(products)
            notes += _say_beside(inner, asked.policy)
        # what cannot be taken back comes last
        notes += _cast(model, asked.policy)
        if asked.policy.gradients == "fp32":
            changes.append(keep_gradients_fp32(inner))
        update = Update(
            optimizer, UPDATES[asked.policy.update], moments=asked.policy.moments, seed=seed, counts=count_swallowed
        )
        optimizer.zero_grad(set_to_none=True)
        custody = Custody(model, optimizer)
    return TrainingRun(
        model=model,
        optimizer=optimizer,
        policy=asked.policy,
        reason=asked.reason,
        notes=tuple(notes),
        settings=settings,
        scheduler=scheduler,
        device_type=place.type,
        emulates=emulates,
        ranks=ranks,
        custody=custody,
        update=update,
        products=products,
        islands=islands,
        changes=(custody, *changes),
    )


def find_policy(policy: GivenPolicy, place: torch.device) -> Chosen:
    """Return the policy that `prepare` would take for a model that is there, and why.

    Args:
        policy: as `prepare` takes it.
        place: where the model is, or will be.

    Raises:
        UnknownName: no policy has that name.
    """
    asked = ask_policy(policy, device_at(place)[0])
    return Chosen(policy=asked.policy, reason=asked.reason)


# --- what is refused before anything changes --------------------------------------------------------------------------


def _place_of(model: nn.Module) -> torch.device:
    places = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    kinds = {place.type for place in places}
    if len(kinds) > 1:
        raise TrainingError(
            f"the model's parameters are on {' and '.join(sorted(kinds))}; move all of them to one kind of device"
        )
    return min(places, key=lambda place: place.index or 0, default=torch.device("cpu"))


def _facts(device: str | Device | None, place: torch.device) -> tuple[Device, str]:
    if device is None:
        return device_at(place)
    if isinstance(device, Device):
        return device, "as given"
    if not isinstance(device, str):
        raise TrainingError(
            f"device is {device!r}; give a name of `bitwright hardware` (what a device can, not where the model is), a "
            "Device, or None: the model's own is recognised"
        )
    return hardware.get(device), "as asked for"


def _say_emulated(policy: Policy, facts: Device, emulate: bool | None) -> list[str]:
    """Refuse a policy that the device does not run natively, or say that it is emulated."""
    why = why_not(policy, facts)
    if why is None:
        return []
    if emulate is False or (emulate is None and facts.kind != "cpu"):
        raise_if_not_native(policy, facts)
    return [f"emulated: {why}"]


def _emulates_compute(policy: Policy, facts: Device, place: torch.device) -> bool:
    """Whether fp32 is to be multiplied by fewer of its bits, and not by the device itself."""
    if policy.compute == "fp32" or policy.compute in AUTOCAST_DTYPES:
        return False
    return place.type not in MATRIX_UNITS or policy.compute not in facts.matmul_tflops


def _raise_if_no_autocast(policy: Policy, place: torch.device) -> None:
    if policy.compute in AUTOCAST_DTYPES and not torch.amp.is_autocast_available(place.type):
        raise TrainingError(f"torch has no autocast for '{place.type}', which policy '{policy.name}' needs; use 'fp32'")


# --- what is changed --------------------------------------------------------------------------------------------------


@contextmanager
def _undone_on_error() -> Iterator[list[Removable]]:
    """A list of changes to the model, which are taken back where the block fails."""
    changes: list[Removable] = []
    try:
        yield changes
    except BaseException:
        for change in reversed(changes):
            change.remove()
        raise


def _cast(model: nn.Module, policy: Policy) -> list[str]:
    """Bring tables and parameters to their formats; what was done, in sentences."""
    if policy.compute not in AUTOCAST_DTYPES:
        return []
    repaired = named_islands.repair_tables(unwrapped(model))
    said = cast_parameters(model, policy)
    tables = [f"tables of positions were in 16 bits, and are computed anew in fp32: {', '.join(repaired)}"]
    return (tables if repaired else []) + ([said] if said else [])


def _say_beside(inner: nn.Module, policy: Policy) -> list[str]:
    """Modules with products that no recipe reaches, in sentences."""
    found = Counter(product_sites(inner, policy).beside.values())
    return [f"{number} modules multiply in {policy.compute} ({why})" for why, number in found.items()]


def _products(
    inner: nn.Module, asked: AskedPolicy, place: torch.device, settings: RunSettings, ranks: Ranks, emulate: bool
) -> PolicyLayers | None:
    """Let linear layers multiply codes; None under a policy without a recipe."""
    if asked.planned is not None:
        assignments: Sequence[Assignment] = asked.planned.by_recipe
        high = asked.planned.high
    elif asked.policy.products is not None:
        sites = product_sites(inner, asked.policy)
        assignments, high = ((asked.policy.products, sites.low),), sites.high
    else:
        return None
    if not assignments:
        return None
    return install_layers(
        inner,
        assignments,
        high,
        place=place,
        emulate=emulate,
        seed=settings.seed,
        rank=ranks.rank,
        reduce_amax=ranks.max if ranks.world_size > 1 else None,
        counts_lost=settings.count_lost,
    )
