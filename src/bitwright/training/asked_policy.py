"""What somebody gave as a policy: a name, a record, "auto", a training plan or its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bitwright.errors import PlanError, TrainingError
from bitwright.hardware import Device
from bitwright.plan.folder import PLAN_FILE
from bitwright.plan.training_folder import load_training_plan
from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.choose import choose_policy
from bitwright.training.policy import AUTO, Policy, policy_named

if TYPE_CHECKING:
    from bitwright.training.planning.planned_policy import PlannedPolicy


#: What may be given.
GivenPolicy: TypeAlias = str | Policy | Path | TrainingPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedPolicy:
    """A policy, and, where a plan says so, the recipe of each product."""

    policy: Policy
    reason: str
    planned: PlannedPolicy | None = None


def ask_policy(policy: GivenPolicy, facts: Device) -> AskedPolicy:
    """Return the policy that is meant.

    Args:
        policy: as `prepare` takes it.
        facts: of the device that "auto" chooses for.

    Raises:
        UnknownName: no policy has that name.
        TrainingError: it is neither a name nor a policy, or a path without a training plan.
    """
    if isinstance(policy, Policy):
        return AskedPolicy(policy=policy, reason="as given")
    if isinstance(policy, TrainingPlan):
        return _of_plan(policy, "the plan that was given")
    if not isinstance(policy, str | Path):
        raise TrainingError(
            f"policy is {policy!r}; give a name of `bitwright train policies`, a Policy, or a training plan or its Path"
        )
    if policy == AUTO:
        chosen = choose_policy(facts)
        return AskedPolicy(policy=chosen.policy, reason=chosen.reason)
    if isinstance(policy, Path) or is_path(policy) or (Path(policy) / PLAN_FILE).is_file():
        return _of_plan(plan_at(policy), f"the plan '{policy}'")
    return AskedPolicy(policy=policy_named(policy), reason="as asked for")


def is_path(name: str) -> bool:
    """Whether a text can only be meant as a path: no policy's name has a separator, or begins with a dot."""
    return name.startswith(".") or any(mark in name for mark in {"/", os.sep, os.altsep} if mark)


def plan_at(given: str | Path) -> TrainingPlan:
    """Return the plan that a policy's path leads to.

    Raises:
        TrainingError: none is there, or none of training.
    """
    path = Path(given)
    if not path.is_file() and not (path / PLAN_FILE).is_file():
        why = f"which has no {PLAN_FILE}" if path.is_dir() else f"and there is no such folder (with a {PLAN_FILE})"
        raise TrainingError(
            f"policy is the path '{given}', {why}; give the folder that `bitwright train plan` wrote, or a policy's "
            "name as a string"
        )
    try:
        return load_training_plan(path)
    except PlanError as error:
        raise TrainingError(
            f"policy is the path '{given}', which is no training plan; give the folder that `bitwright train plan` "
            f"wrote ({error})"
        ) from error


def _of_plan(plan: TrainingPlan, name: str) -> AskedPolicy:
    from bitwright.training.planning.planned_policy import policy_of_plan

    planned = policy_of_plan(plan)
    return AskedPolicy(policy=planned.policy, reason=f"{name}: {planned.reason}", planned=planned)
