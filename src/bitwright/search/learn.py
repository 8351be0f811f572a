"""Scores for every site and choice: from the cache where they are, else by one calibration pass.

Only what is missing is worked out. A further scheme costs one more pass over the statistics, a further budget nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from bitwright.models import Site
from bitwright.search.cache import Cache
from bitwright.search.calibrate import Output, calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.progress import Progress
from bitwright.search.quantizer import Quantizer
from bitwright.search.score import Scores, score, site_moments
from bitwright.search.text import TextSet


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What calibration knows of a model."""

    #: Site → candidate → predicted KL before probes; sites that no token reached are absent.
    scores: Scores
    #: Finds the codes of every choice.
    quantizer: Quantizer


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
) -> Learned:
    """Scores of `candidates` at `sites`."""
    known, moments = cache.read_scores(), cache.read_moments()
    missing = [c for c in candidates if c not in known] if moments else list(candidates)
    quantizer = Quantizer(moments=moments)
    if missing:
        with progress.stage("calibrate", text.num_sequences) as stage:
            statistics = calibrate(model, sites, text, seed=seed, stage=stage, output=output)
        moments = site_moments(sites, statistics)
        quantizer = Quantizer(moments=moments)
        found_now: dict[Candidate, dict[str, float]] = {c: {} for c in missing}
        with progress.stage("score", len(sites)) as stage:
            for site, scores in score(model, sites, statistics, quantizer, missing):
                for candidate, kl in scores.items():
                    found_now[candidate][site.name] = kl
                stage.advance()
        known = {**known, **found_now}
        cache.write_scores(known)
        cache.write_moments(moments)
    return Learned(
        scores={
            site.name: {c: known[c][site.name] for c in candidates}
            for site in sites
            if all(site.name in known[c] for c in candidates)
        },
        quantizer=quantizer,
    )
