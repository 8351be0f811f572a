"""What somebody gave as a policy: a name, a record, "auto", a training plan or its folder."""

from __future__ import annotations

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
    if isinstance(policy, Path) or (Path(policy) / PLAN_FILE).is_file():
        return _planned(Path(policy))
    return AskedPolicy(policy=policy_named(policy), reason="as asked for")


def _planned(path: Path) -> AskedPolicy:
    if not path.is_file() and not (path / PLAN_FILE).is_file():
        raise TrainingError(
            f"policy is the path '{path}', and no plan is there; give the folder that `bitwright train plan` wrote, or "
            "a policy's name as a string"
        )
    try:
        return _of_plan(load_training_plan(path), f"the plan '{path}'")
    except PlanError as error:
        raise TrainingError(
            f"policy is the path '{path}', which is no training plan; give the folder that `bitwright train plan` "
            f"wrote ({error})"
        ) from error


def _of_plan(plan: TrainingPlan, name: str) -> AskedPolicy:
    from bitwright.training.planning.planned_policy import policy_of_plan

    planned = policy_of_plan(plan)
    return AskedPolicy(policy=planned.policy, reason=f"{name}: {planned.reason}", planned=planned)
