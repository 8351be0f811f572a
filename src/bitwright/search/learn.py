"""Scores for every site and choice: from the cache where they are, else by one calibration pass.

Only what is missing is worked out. A further scheme costs one more pass over the statistics, a further budget nothing.

With a spool, what calibration saw lies on disk until the scores are known, and codes that are found lie there for the
rest of the search. Scores and codes are the same.

A site that few tokens reached (an expert that the text does not call for) keeps its loaded format: less than one window
of tokens is less than one sample of what scores sum, and codes fitted to it would fit noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import nn

from bitwright.models import Site
from bitwright.models.heap import give_back_freed_memory
from bitwright.models.linear_calls import matrices_of
from bitwright.models.spool import Spool
from bitwright.quantize.seen import WINDOW_TOKENS
from bitwright.search.cache import Cache
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.joint_fits import seen_at
from bitwright.search.optimism import measure_optimism
from bitwright.search.output import Output
from bitwright.search.progress import Progress
from bitwright.search.quantizer import Quantizer
from bitwright.search.recorder import Statistics
from bitwright.search.score import Scores, score
from bitwright.search.text import TextSet

#: Tokens that have to reach a site before anything is chosen for it.
MIN_TOKENS = WINDOW_TOKENS


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What calibration knows of a model."""

    #: Site → candidate → predicted KL before probes; sites that too few tokens reached are absent.
    scores: Scores
    #: Finds the codes of every choice.
    quantizer: Quantizer
    #: Site → candidate → numbers beyond their format before the cast, expected per scored prediction; absent: none.
    overflows: Scores = field(default_factory=dict)
    #: Site → calibration tokens that reached it.
    reached: dict[str, int] = field(default_factory=dict)

    @property
    def too_few(self) -> dict[str, int]:
        """Sites that stay as loaded because fewer than MIN_TOKENS tokens reached them, and how many did."""
        return {name: count for name, count in self.reached.items() if count < MIN_TOKENS}


def learn(
    model: nn.Module,
    sites: Sequence[Site],
    text: TextSet,
    candidates: Sequence[Candidate],
    *,
    seed: int,
    cache: Cache,
    progress: Progress,
    output: Output | None = None,
    spool: Spool | None = None,
    shared: Mapping[str, str] | None = None,
) -> Learned:
    """Scores of `candidates` at `sites`; sites that `shared` names with one norm are fitted one set of factors."""
    known, overflows, reached = cache.read_scores(), cache.read_overflows(), cache.read_reached()
    quantizer = Quantizer(shapes={site.name: site.shape for site in sites}, cache=cache, spool=spool)
    missing = [c for c in candidates if c not in known]
    if missing:
        with nullcontext() if spool is None else Spool(spool.folder) as seen:
            with progress.stage("calibrate", text.num_sequences) as stage:
                statistics = calibrate(model, sites, text, seed=seed, stage=stage, output=output, spool=seen)
            if seen is not None:
                give_back_freed_memory()
            reached = count_tokens(sites, statistics)
            enough = [site for site in sites if reached[site.name] >= MIN_TOKENS]
            known |= {c: {} for c in missing}
            overflows |= {c: {} for c in missing}
            with progress.stage("score", len(enough)) as stage:
                optimism = measure_optimism(model, enough, statistics, missing)
                for found in score(model, enough, statistics, quantizer, missing, optimism, shared):
                    for candidate, kl in found.kl.items():
                        known[candidate][found.site.name] = kl
                    for candidate, count in found.overflows.items():
                        overflows[candidate][found.site.name] = count
                    if seen is not None:
                        give_back_freed_memory()
                    stage.advance()
        quantizer.write()
        cache.write_overflows(overflows)
        cache.write_reached(reached)
        cache.write_scores(known)  # last: what has scores has everything
    return Learned(
        scores=_by_site(sites, candidates, known),
        quantizer=quantizer,
        overflows=_by_site(sites, candidates, overflows),
        reached={site.name: reached[site.name] for site in sites},
    )


def count_tokens(sites: Sequence[Site], statistics: Statistics) -> dict[str, int]:
    """Site → tokens that reached it and move something: padding does not."""
    counts = {}
    for matrix in matrices_of(sites):
        for site in matrix.sites:
            seen = seen_at(site, matrix.name, statistics)
            weights_T = None if seen is None else seen.token_weights_T
            counts[site.name] = (
                0 if seen is None else len(seen.x_TK) if weights_T is None else int((weights_T > 0).sum())
            )
    return counts


def _by_site(
    sites: Sequence[Site], candidates: Sequence[Candidate], known: dict[Candidate, dict[str, float]]
) -> Scores:
    """Turn candidate → site → number inside out; sites without any number are absent."""
    by_site = {
        site.name: {c: known[c][site.name] for c in candidates if site.name in known.get(c, {})} for site in sites
    }
    return {name: numbers for name, numbers in by_site.items() if numbers}
