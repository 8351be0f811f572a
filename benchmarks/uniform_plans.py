"""Plans without a search: one scheme everywhere, written and priced as a search does (`bitwright/search/draft.py`)."""

from __future__ import annotations

from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, ModelInfo, Plan, Summary, TextInfo
from bitwright.search.candidate import Candidate
from bitwright.search.draft import weight_choice
from bitwright.search.price import AS_LOADED, END_ROLES, price_model


def uniform_plan(loaded: LoadedModel, scheme: str, ends: str = AS_LOADED.scheme) -> Plan:
    """Every matrix of the decoder under a scheme, rounded to nearest; embedding and head under `ends`."""
    sites = find_sites(loaded.model)
    prices = price_model(loaded, sites)
    assignment = {site.name: Candidate(scheme=ends if site.role in END_ROLES else scheme) for site in sites}
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
        sites=tuple(
            weight_choice(
                site,
                assignment[site.name],
                reason="a benchmark",
                num_bytes=prices.site_bytes(site, assignment[site.name]),
                predicted_kl=0.0,
            )
            for site in sites
        ),
        summary=Summary(
            effective_bits=prices.effective_bits(assignment),
            nominal_bits=prices.nominal_bits(assignment),
            weight_bytes=prices.model_bytes(assignment),
            predicted_kl=0.0,
        ),
        met=False,
    )
