"""Plans without a search: choices that are given, or one scheme everywhere, priced as a search does it."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Budget, ModelInfo, Plan, SiteChoice, Summary, TextInfo
from bitwright.search.candidate import Candidate
from bitwright.search.draft import summary_of, weight_choice
from bitwright.search.price import AS_LOADED, END_ROLES, price_model


def unsearched_plan(loaded: LoadedModel, choices: Sequence[SiteChoice], summary: Summary) -> Plan:
    """A plan of choices that nobody searched for: it has no text and no limits."""
    text = TextInfo(source="none", tokens=0, sequences=0, hash="0" * 64)
    return Plan(
        model=ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters),
        hardware="cpu-generic",
        task="text",
        budget=Budget(),
        objective="kl",
        seed=0,
        calibration=text,
        evaluation=text,
        sites=tuple(choices),
        summary=summary,
        met=False,
    )


def uniform_plan(loaded: LoadedModel, scheme: str, ends: str = AS_LOADED.scheme) -> Plan:
    """Every matrix of the decoder under a scheme, rounded to nearest; embedding and head under `ends`."""
    sites = find_sites(loaded.model)
    prices = price_model(loaded, sites)
    assignment = {site.name: Candidate(scheme=ends if site.role in END_ROLES else scheme) for site in sites}
    choices = [
        weight_choice(
            site,
            assignment[site.name],
            reason="a benchmark",
            num_bytes=prices.site_bytes(site, assignment[site.name]),
            predicted_kl=0.0,
        )
        for site in sites
    ]
    return unsearched_plan(loaded, choices, summary_of(prices, assignment, predicted_kl=0.0))


def with_coded_caches(plan: Plan, loaded: LoadedModel, scheme: str) -> Plan:
    """The same plan with all keys and values kept in a scheme whose scales are found token by token."""
    caches = [
        SiteChoice(
            name=site.name,
            kind=site.kind,
            role=site.role,
            module=site.module,
            rows=None,
            tied_group=site.tied_group,
            shape=site.shape,
            scheme=scheme,
            rounding="rtn",
            transform="none",
            reason="a benchmark",
            bytes=0,
            bits=0.0,
            predicted_kl=0.0,
        )
        for site in find_value_sites(loaded.model)
        if site.role == "kv_cache"
    ]
    return plan.replace(sites=(*plan.sites, *caches))
