"""What a search is asked: limits, choices, text sizes, all checked before any work begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwright import hardware as hardware_catalog
from bitwright.errors import SchemeError
from bitwright.plan import Budget, Objective, Workload, settle_budget
from bitwright.quantize import SCHEMES
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.limits import quality_target

#: The first solution aims this far below a quality limit: an interval's upper end, not its mean, must keep the limit.
FIRST_AIM = 0.88


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a search was asked, checked and filled in."""

    budget: Budget
    objective: Objective
    objective_reason: str
    device: hardware_catalog.Device
    device_reason: str
    workload: Workload
    task: str
    #: Built-in sets or files.
    calibration: str | Path
    evaluation: str | Path
    schemes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    include_head: bool
    tokens: int
    evaluation_tokens: int
    sequence_length: int
    seed: int


def default_schemes() -> tuple[str, ...]:
    """What is chosen from unless told otherwise: the schemes that are marked so.

    They leave activations in 16 bits, since no limit that can be given asks for faster matrix products and rounding
    activations further could only lose quality. Of the asymmetric groups only those of 32 are among them: each more
    costs a clip search of every weight, and the others lie close to a symmetric neighbour of equal size.
    """
    return tuple(name for name, scheme in SCHEMES.items() if scheme.in_default_search)


def settle(
    budget: Budget,
    *,
    objective: str | None,
    workload: Workload,
    hardware: str | None,
    task: str,
    calibration: str | Path,
    evaluation: str | Path,
    schemes: Sequence[str] | None,
    include_head: bool,
    tokens: int,
    evaluation_tokens: int | None,
    sequence_length: int,
    seed: int,
) -> Settings:
    """Check what was asked and fill in what was left open; every reason is kept.

    Raises:
        UnknownName: no such scheme or device.
        SchemeError: no scheme to choose from.
        BudgetError: limits that contradict each other.
    """
    settled = settle_budget(budget, objective, workload)
    names = tuple(dict.fromkeys(schemes)) if schemes is not None else default_schemes()
    if not names:
        raise SchemeError("no scheme to choose from; name at least one, or leave schemes out for the default")
    not_a_choice = [name for name in names if SCHEMES[name].weights is None]
    if not_a_choice:
        raise SchemeError(
            f"{not_a_choice[0]!r} is not a choice: it is what a site keeps when nothing is chosen; leave it out of the "
            "schemes"
        )
    if hardware is None:
        device, reason = hardware_catalog.detect()
    else:
        device, reason = hardware_catalog.get(hardware), "asked for"
    return Settings(
        budget=settled.budget,
        objective=settled.objective,
        objective_reason=settled.reason,
        device=device,
        device_reason=reason,
        workload=workload,
        task=task,
        calibration=calibration,
        evaluation=evaluation,
        schemes=names,
        candidates=candidates_of(names),
        include_head=include_head,
        tokens=tokens,
        evaluation_tokens=evaluation_tokens if evaluation_tokens is not None else max(64 * sequence_length, 2 * tokens),
        sequence_length=sequence_length,
        seed=seed,
    )


def first_aim(budget: Budget) -> float | None:
    """The mean KL that the first solution aims for, nats per token; None where quality is not limited."""
    target = quality_target(budget)
    return None if target is None else FIRST_AIM * target
