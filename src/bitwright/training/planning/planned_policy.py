"""What `prepare` runs for a training plan: a `Policy` for everything but the products, and the recipe of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.plan.training_plan import TrainingPlan
from bitwright.training.policy import POLICIES, Policy
from bitwright.training.product_recipe import ProductRecipe


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


def policy_of_plan(plan: TrainingPlan) -> PlannedPolicy:
    """Return what `prepare` runs for a plan.

    Raises:
        UnknownName: the plan names a policy that is not there any more.
    """
    policy = POLICIES[plan.policy]
    master = plan.site("masters")
    if master.choice == "bf16":
        policy = without_masters(policy)
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


def without_masters(policy: Policy) -> Policy:
    """Return a policy as a plan has it that cannot hold fp32 masters."""
    return replace(policy, parameters="bf16", update="stochastic")
