"""The model of a plan: loaded from where it was planned, and checked to be the one that the plan is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from bitwright.errors import PlanError
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel, hash_each_weight
from bitwright.models.sites import Site, find_sites
from bitwright.plan import Plan

#: Differences that an error names.
_NAMED = 5


def open_model(
    plan: Plan, source: str | Path | LoadedModel | None = None, *, allow_pickle: bool = False
) -> tuple[LoadedModel, tuple[Site, ...]]:
    """Load the model of a plan, and find its sites.

    Args:
        plan: says where the model lay.
        source: where it lies now; None: there still.
        allow_pickle: accept pickled weights.

    Raises:
        PlanError: nothing lies there any more, or the weights are others than the plan was made for.
        ModelError: the model cannot be read.
    """
    where = plan.run.paths.get("model", plan.model.name) if source is None else source
    if isinstance(where, str) and Path(where).is_absolute() and not Path(where).exists():
        raise PlanError(f"the plan's model lay at '{where}' and is no longer there; give it with --model")
    site_file = _site_file(plan)
    if isinstance(where, LoadedModel):
        loaded = where
    else:
        loaded = load(where, allow_pickle=allow_pickle, seed=plan.seed, site_file=site_file)
    sites = find_sites(loaded.model, site_file)
    raise_if_other_model(plan, loaded, sites)
    return loaded, sites


def sites_of(plan: Plan, model: nn.Module) -> tuple[Site, ...]:
    """A model's weight sites as the plan has them: found, or those that its site file names.

    Raises:
        PlanError: the site file is no longer there.
    """
    return find_sites(model, _site_file(plan))


def _site_file(plan: Plan) -> str | None:
    where = plan.run.paths.get("sites")
    if where is not None and not Path(where).exists():
        raise PlanError(f"the plan's sites lay at '{where}' and is no longer there; put it back: it names the sites")
    return where


def raise_if_other_model(plan: Plan, loaded: LoadedModel, sites: Sequence[Site]) -> None:
    """Raise PlanError unless a plan was made for these weights: which tensors differ, as far as the plan can tell.

    A plan holds a hash of all weights and one of each, and names and shapes of its sites; plans of schemas before 3
    have none of single tensors.
    """
    if plan.model.hash == loaded.hash:
        return
    differing = [*_other_shapes(plan, sites), *_other_values(plan, loaded)]
    listed = "; ".join(differing[:_NAMED])
    more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    if not differing:
        listed = f"the shapes of all {sum(c.kind == 'weight' for c in plan.sites)} tensors agree, their values do not"
    raise PlanError(
        f"the weights of {loaded.name!r} (hash {loaded.hash[:12]}) are not those that the plan was made for "
        f"({plan.model.name!r}, hash {plan.model.hash[:12]}): {listed}{more}; give the right model with --model, or "
        "plan anew"
    )


def _other_shapes(plan: Plan, sites: Sequence[Site]) -> Iterator[str]:
    """Sites that are not there, or are of another shape."""
    found = {site.name: site.shape for site in sites}
    for choice in plan.sites:
        if choice.kind == "weight" and choice.name not in found:
            yield f"{choice.name} is not in it"
        elif choice.kind == "weight" and found[choice.name] != choice.shape:
            yield f"{choice.name} is {list(found[choice.name])} instead of {list(choice.shape)}"


def _other_values(plan: Plan, loaded: LoadedModel) -> Iterator[str]:
    """Tensors of the plan with other values, with their number before the first, and those that it does not have."""
    if not plan.tensor_hashes:
        return
    found = hash_each_weight(loaded.model)
    differing = [name for name, known in plan.tensor_hashes.items() if name in found and found[name] != known]
    for place, name in enumerate(differing):
        count = f"{len(differing)} of {len(plan.tensor_hashes)} tensors have other values: " if place == 0 else ""
        yield f"{count}{name}"
    yield from (f"{name} is not in the plan" for name in found if name not in plan.tensor_hashes)
