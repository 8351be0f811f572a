"""What can be chosen at each site, and what the device or the engine rules out, before anything is scored.

A choice is ruled out site by site (`plan/rules.py`): a group size may fit the columns of one matrix and not those of
another. What is ruled out everywhere is never scored; what is ruled out at some sites is left out there. A site at
which nothing is left keeps its loaded format. Every reason is listed in the plan.

Where an engine has a transform only as factors in the norm before, the transform is left where there is such a norm
(`models/norm_readers.py`) and all that read it can have it: they then choose together, and share one set of factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bitwright.errors import SchemeError
from bitwright.hardware import Device
from bitwright.models import Site
from bitwright.models.norm_readers import FactorHomes
from bitwright.models.value_sites import ValueSite
from bitwright.plan import RuledOutChoice
from bitwright.plan.rules import Engine, TransformFacts, is_folded, ties, why_not
from bitwright.quantize import SCHEMES, TRANSFORMS, VALUE_SCHEMES
from bitwright.search.candidate import Candidate
from bitwright.search.price import AS_LOADED, AnySite
from bitwright.search.score import Scores
from bitwright.search.value_scores import value_candidates


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is left to choose from."""

    #: Site → what can be chosen there; sites with nothing are absent.
    candidates: Mapping[str, tuple[Candidate, ...]]
    ruled_out: tuple[RuledOutChoice, ...] = ()
    #: Site → group that has to choose together.
    ties: Mapping[str, str] = field(default_factory=dict)
    #: Site → norm that takes its factors: sites of one norm choose together, and share one set of factors.
    shared: Mapping[str, str] = field(default_factory=dict)

    def of_weights(self, sites: Iterable[Site]) -> tuple[Candidate, ...]:
        """Every candidate of any of these sites, each once."""
        return tuple(dict.fromkeys(c for site in sites for c in self.candidates.get(site.name, ())))

    def allowed(self, scores: Scores) -> Scores:
        """Scores of what is left; sites with nothing are absent."""
        kept = {
            name: {c: kl for c, kl in of_site.items() if c == AS_LOADED or c in set(self.candidates.get(name, ()))}
            for name, of_site in scores.items()
        }
        return {name: of_site for name, of_site in kept.items() if of_site}


def find_choices(
    sites: Sequence[Site],
    value_sites: Sequence[ValueSite],
    candidates: Sequence[Candidate],
    value_schemes: Sequence[str],
    *,
    device: Device | None,
    engine: Engine | None,
    sequence_length: int,
    homes: FactorHomes | None = None,
    kernels_on: Device | None = None,
) -> Choices:
    """What a device and an engine leave of the candidates.

    Args:
        sites: weight sites in question.
        value_sites: value sites in question.
        candidates: what was asked for at weight sites.
        value_schemes: names of what was asked for at value sites.
        device: whose rules count; None where no device was asked for.
        engine: likewise.
        sequence_length: tokens of the texts that choices are judged on.
        homes: where factors can go; to be given where `asks_for_homes`.
        kernels_on: the device that the engine has to have kernels on; None: `device`.

    Raises:
        SchemeError: nothing is left at any weight site; the first reason is given.
    """
    found: dict[tuple[str, str], list[str]] = {}
    left: dict[str, tuple[Candidate, ...]] = {}

    def sift(site: AnySite, asked: Sequence[Candidate]) -> None:
        reasons: dict[Candidate, str | None] = {}
        for changed in dict.fromkeys(_without_rounding(candidate) for candidate in asked):
            reason = _reason(site, changed, device, engine, kernels_on) or _unseen(site, changed, sequence_length)
            if reason is None and homes is not None and site.name in homes.refused and _is_folded(changed, engine):
                reason = homes.refused[site.name]
            reasons[changed] = reason
            if reason is not None:
                found.setdefault((str(changed), reason), []).append(site.name)
        kept = tuple(candidate for candidate in asked if reasons[_without_rounding(candidate)] is None)
        if kept:
            left[site.name] = kept

    for site in sites:
        sift(site, candidates)
    for value_site in value_sites:
        sift(value_site, value_candidates(value_site, value_schemes))
    shared, lonely = _share(left, engine, homes or FactorHomes())
    for key, where in lonely.items():
        found.setdefault(key, []).extend(where)
    ruled_out = tuple(
        RuledOutChoice(scheme=scheme, reason=reason, sites=len(where), example=where[0])
        for (scheme, reason), where in found.items()
    )
    if sites and not any(site.name in left for site in sites):
        raise SchemeError(
            f"every scheme is ruled out at every site, as {ruled_out[0].scheme}: {ruled_out[0].reason}. Name other "
            "schemes, another device or another engine"
        )
    return Choices(candidates=left, ruled_out=ruled_out, ties=ties((*sites, *value_sites), engine), shared=shared)


def asks_for_homes(candidates: Iterable[Candidate], engine: Engine | None) -> bool:
    """Say whether it matters to a choice where factors can go."""
    return any(_is_folded(candidate, engine) for candidate in candidates)


def _share(
    left: dict[str, tuple[Candidate, ...]], engine: Engine | None, homes: FactorHomes
) -> tuple[dict[str, str], dict[tuple[str, str], list[str]]]:
    """Leave a folded transform only where all that read the norm are left it.

    Returns:
        Site → norm, for sites that are left one; and what was taken: (choice, reason) → sites.
    """
    readers: dict[str, list[str]] = {}
    for name, norm in homes.norms.items():
        readers.setdefault(norm, []).append(name)
    shared: dict[str, str] = {}
    taken: dict[tuple[str, str], list[str]] = {}
    for norm, names in readers.items():
        before = {name: left.get(name, ()) for name in names}
        for name in names:
            kept = []
            for candidate in before[name]:
                lacking = [other for other in names if candidate not in before[other]]
                if not _is_folded(candidate, engine) or not lacking:
                    kept.append(candidate)
                    continue
                reason = f"its factors cannot go into {norm}: {lacking[0]} reads it too, and cannot have them"
                where = taken.setdefault((str(_without_rounding(candidate)), reason), [])
                where += [name] * (name not in where)
            if name in left:
                left[name] = tuple(kept)
            if any(_is_folded(candidate, engine) for candidate in kept):
                shared[name] = norm
    return shared, taken


def _is_folded(candidate: Candidate, engine: Engine | None) -> bool:
    return is_folded(TRANSFORMS[candidate.transform], engine)


def _without_rounding(candidate: Candidate) -> Candidate:
    """The candidate as rules see it: how codes were found changes nothing for a kernel."""
    return Candidate(scheme=candidate.scheme, transform=candidate.transform)


def _reason(
    site: AnySite, candidate: Candidate, device: Device | None, engine: Engine | None, kernels_on: Device | None
) -> str | None:
    if isinstance(site, ValueSite):
        return why_not(site, VALUE_SCHEMES[candidate.scheme], device=device, engine=engine, kernels_on=kernels_on)
    transform = TRANSFORMS[candidate.transform]
    facts: TransformFacts | None = transform if transform.parts else None
    scheme = SCHEMES[candidate.scheme]
    return why_not(site, scheme, device=device, engine=engine, transform=facts, kernels_on=kernels_on)


def _unseen(site: AnySite, candidate: Candidate, sequence_length: int) -> str | None:
    """Why texts of this length would not show what a choice costs."""
    if not isinstance(site, ValueSite) or VALUE_SCHEMES[candidate.scheme].group_tokens <= sequence_length:
        return None
    return (
        f"it rounds groups of {VALUE_SCHEMES[candidate.scheme].group_tokens} tokens, which sequences of "
        f"{sequence_length} never fill; a longer --sequence-length shows what it costs"
    )
