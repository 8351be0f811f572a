"""What a search is asked: limits, choices, text sizes, all checked before any work begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bitwright import hardware as hardware_catalog
from bitwright.errors import HardwareError, SchemeError
from bitwright.hardware import Device
from bitwright.plan import Budget, Objective, Workload, settle_budget
from bitwright.plan.rules import Engine, get_engine, runs_on
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS, VALUE_SCHEMES
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.limits import quality_target
from bitwright.search.value_learn import default_value_schemes

#: The first solution aims this far below a quality limit: an interval's upper end, not its mean, must keep the limit.
FIRST_AIM = 0.88
#: `--effort high` refines codes on so many times the calibration tokens, where the text has as many.
REFINEMENT_TEXT = 4

Effort = Literal["default", "high"]
#: Which values are rounded: "auto" is the KV cache under a context, and nothing without one.
Values = Literal["auto", "none", "cache", "all"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a search was asked, checked and filled in."""

    budget: Budget
    objective: Objective
    objective_reason: str
    device: Device
    device_reason: str
    #: Whether the device's rules count: those of a CPU that was merely found do not, as plans are made on CPUs
    #: for other machines.
    device_rules: bool
    engine: Engine | None
    workload: Workload
    task: str
    #: Built-in sets or files.
    calibration: str | Path
    evaluation: str | Path
    schemes: tuple[str, ...]
    roundings: tuple[str, ...] | None
    transforms: tuple[str, ...] | None
    candidates: tuple[Candidate, ...]
    #: Names of value schemes, and the roles of value sites that are in question; None is all of them.
    value_schemes: tuple[str, ...]
    value_roles: frozenset[str] | None
    #: Whether a value may also stay as it is: where its schemes were named, it is one of them.
    values_may_stay: bool
    effort: Effort
    include_head: bool
    #: Names the sites of a model in which none are found.
    site_file: Path | str | None
    tokens: int
    evaluation_tokens: int
    sequence_length: int
    seed: int

    @property
    def ruling_device(self) -> Device | None:
        """The device, where its rules count."""
        return self.device if self.device_rules else None

    @property
    def kernel_device(self) -> Device | None:
        """The device that the engine has to have kernels on; none where it is not asked for and the engine runs
        elsewhere: plans may be made on one machine for another.
        """
        return self.device if self.engine is not None and runs_on(self.engine, self.device) else self.ruling_device

    @property
    def kernel_note(self) -> str | None:
        """What a reader has to know where the kernels are asked of no device; None where there is nothing."""
        if self.engine is None or self.kernel_device is not None:
            return None
        return (
            f"{self.engine.name} does not run on {self.device.name}, so nothing was ruled out for want of a kernel; "
            "name the device that will serve the plan with --hardware"
        )


def default_schemes(budget: Budget | None = None, device: Device | None = None) -> tuple[str, ...]:
    """What is chosen from unless told otherwise: the schemes that are marked so.

    They leave activations in 16 bits: rounding them could only lose quality, unless the time to read prompts is
    limited. Then those that the device multiplies natively are among them, for they alone make long products faster.
    Of the asymmetric groups only those of 32 are among them: each more costs a search of every weight, and the others
    lie close to a symmetric neighbour of equal size.
    """
    wants_faster_products = budget is not None and budget.prefill_sla_s is not None and device is not None
    return tuple(
        name
        for name, scheme in SCHEMES.items()
        if scheme.in_default_search
        or (
            wants_faster_products
            and device is not None
            and scheme.activations is not None
            and scheme.activations.scaling is not None
            and scheme.activations.format in device.matmul_tflops
        )
    )


def settle(
    budget: Budget,
    *,
    objective: str | None = None,
    workload: Workload | None = None,
    hardware: str | None = None,
    device_file: Path | str | None = None,
    engine: str | None = None,
    task: str,
    calibration: str | Path,
    evaluation: str | Path,
    schemes: Sequence[str] | None = None,
    roundings: Sequence[str] | None = None,
    transforms: Sequence[str] | None = None,
    values: str = "auto",
    effort: str = "default",
    include_head: bool = False,
    site_file: Path | str | None = None,
    tokens: int,
    evaluation_tokens: int | None,
    sequence_length: int,
    seed: int,
) -> Settings:
    """Check what was asked and fill in what was left open; every reason is kept.

    Raises:
        UnknownName: no such scheme, rounding, transform, device or engine.
        SchemeError: no scheme to choose from.
        HardwareError: a device is asked for twice, or its file is wrong.
        BudgetError: limits that contradict each other.
    """
    workload = workload if workload is not None else Workload()
    settled = settle_budget(budget, objective, workload)
    device, reason = _device(hardware, device_file)
    names = tuple(dict.fromkeys(schemes)) if schemes is not None else default_schemes(settled.budget, device)
    of_weights, of_values = _sort_schemes(names)
    chosen_effort = _one_of(effort, Effort, "effort")
    asked_roundings = _names(roundings, ROUNDINGS)
    asked_transforms = _names(transforms, TRANSFORMS)
    candidates = candidates_of(of_weights, asked_roundings, asked_transforms)
    if not candidates:
        raise SchemeError("none of the roundings applies to any of the schemes; add 'rtn', which applies to all")
    roles, value_schemes = _values(values, of_values, workload)
    return Settings(
        budget=settled.budget,
        objective=settled.objective,
        objective_reason=settled.reason,
        device=device,
        device_reason=reason,
        device_rules=hardware is not None or device_file is not None or device.kind != "cpu",
        engine=None if engine is None else get_engine(engine),
        workload=workload,
        task=task,
        calibration=calibration,
        evaluation=evaluation,
        schemes=of_weights,
        roundings=asked_roundings,
        transforms=asked_transforms,
        candidates=candidates,
        value_schemes=value_schemes,
        value_roles=roles,
        values_may_stay=not of_values,
        effort=chosen_effort,
        include_head=include_head,
        site_file=site_file,
        tokens=tokens,
        evaluation_tokens=evaluation_tokens if evaluation_tokens is not None else max(64 * sequence_length, 2 * tokens),
        sequence_length=sequence_length,
        seed=seed,
    )


def _device(hardware: str | None, device_file: Path | str | None) -> tuple[Device, str]:
    if hardware is not None and device_file is not None:
        raise HardwareError(
            f"the device is asked for twice, as {hardware!r} and as the file {str(device_file)!r}; leave one out"
        )
    if device_file is not None:
        return hardware_catalog.read_device_file(device_file), f"asked for: {Path(device_file).name}"
    return hardware_catalog.detect() if hardware is None else (hardware_catalog.get(hardware), "asked for")


def _sort_schemes(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of schemes of weights, and of values; a name that both have means both."""
    unknown = [name for name in names if name not in SCHEMES and name not in VALUE_SCHEMES]
    if unknown:
        SCHEMES[unknown[0]]  # raises, with the nearest name
    of_weights = tuple(name for name in names if name in SCHEMES)
    not_a_choice = [name for name in of_weights if SCHEMES[name].weights is None]
    if not_a_choice:
        raise SchemeError(
            f"{not_a_choice[0]!r} is not a choice: it is what a site keeps when nothing is chosen; leave it out of the "
            "schemes"
        )
    if not of_weights:
        raise SchemeError("no scheme to choose from for weights; name at least one, or leave schemes out")
    return of_weights, tuple(name for name in names if name in VALUE_SCHEMES)


def _values(
    values: str, asked_for: tuple[str, ...], workload: Workload
) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Roles of value sites in question, None for all; and the value schemes to choose from."""
    which = _one_of(values, Values, "choice of values")
    if which == "auto":
        which = "cache" if workload.context is not None else "none"
    if which == "none":
        return frozenset(), ()
    return (frozenset({"kv_cache"}) if which == "cache" else None), asked_for or default_value_schemes()


def _names(names: Sequence[str] | None, catalog: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names that a catalog has, each once; None stays None."""
    if names is None:
        return None
    for name in names:
        catalog[name]
    return tuple(dict.fromkeys(names))


def _one_of(word: str, words: Any, what: str) -> Any:
    if word not in get_args(words):
        raise SchemeError(f"unknown {what} {word!r}; use one of {', '.join(get_args(words))}")
    return word


def first_aim(budget: Budget) -> float | None:
    """The mean KL that the first solution aims for, nats per token; None where quality is not limited."""
    target = quality_target(budget)
    return None if target is None else FIRST_AIM * target
