"""Running an assignment and comparing it with the reference: the only way a KL is ever called measured.

The same assignment on the same text is measured once: results are kept by a digest of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from bitwright.inference import Counters, emulate
from bitwright.models import Site
from bitwright.models.spool import Originals
from bitwright.models.value_sites import ValueSite
from bitwright.search.cache import Cache
from bitwright.search.output import Effects, Output, Reference
from bitwright.search.price import AS_LOADED, Assignment
from bitwright.search.progress import Stage
from bitwright.search.quantizer import Quantizer
from bitwright.search.value_scores import ValueLearned

#: What is said of a prediction that stands beside a measurement with other codes than it is of.
PREDICTED_BEFORE = ", predicted before its codes were refined"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredKl:
    """A KL as a text has it."""

    #: Mean, nats per scored prediction.
    kl: float
    #: Its standard error over the sequences, relative; 0 where there is one sequence.
    relative_error: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Meter:
    """Measures assignments on one text."""

    model: nn.Module
    sites: Sequence[Site]
    quantizer: Quantizer
    output: Output
    reference: Reference
    cache: Cache
    #: Value sites in question, and what they run with.
    value_sites: Sequence[ValueSite] = ()
    values: ValueLearned | None = None
    #: Where weights lie while others stand in their place; None: in memory.
    originals: Originals | None = None

    def with_codes(self, refined: Mapping[str, Mapping[str, np.ndarray]]) -> Meter:
        """The same with other codes at some sites, whichever assignment runs (`Quantizer.refined`)."""
        return replace(self, quantizer=replace(self.quantizer, refined=refined))

    def kl(self, assignment: Assignment, num_sequences: int, stage: Stage) -> float:
        """Mean KL on the first `num_sequences` sequences, nats; sites that are not named stay as loaded."""
        return self.measured(assignment, num_sequences, stage).kl

    def measured(self, assignment: Assignment, num_sequences: int, stage: Stage) -> MeasuredKl:
        """The same with its standard error."""
        if self.quantizer.refined:  # an assignment does not say which codes they are
            return with_error(self.effects(assignment, num_sequences, stage))
        key = self._digest(assignment, num_sequences)
        known, key_of_error = self.cache.read_measured(), f"{key} error"
        if key in known and key_of_error in known:
            stage.advance(num_sequences)
            return MeasuredKl(kl=known[key], relative_error=known[key_of_error])
        found = with_error(self.effects(assignment, num_sequences, stage))
        self.cache.write_measured({**self.cache.read_measured(), key: found.kl, key_of_error: found.relative_error})
        return found

    def effects(
        self, assignment: Assignment, num_sequences: int | None, stage: Stage, counters: Counters | None = None
    ) -> Effects:
        """Everything a comparison tells, per sequence; overflows before the cast are added to `counters`."""
        with torch.no_grad(), self.running(assignment, counters) as model:
            return self.output.compare(self.reference, model, stage, num_sequences)

    @contextmanager
    def running(self, assignment: Assignment, counters: Counters | None = None) -> Iterator[nn.Module]:
        """The model under an assignment, for the time of the block; sites that are not named stay as loaded."""
        of_weights = {site.name: assignment[site.name] for site in self.sites if site.name in assignment}
        rules = self.quantizer.rules(of_weights)
        values = self.values.rules(self.value_sites, assignment) if self.values is not None else None
        with emulate(
            self.model, self.sites, rules, values=values, originals=self.originals, counters=counters
        ) as model:
            yield model

    def _digest(self, assignment: Assignment, num_sequences: int) -> str:
        changed = sorted((name, str(c)) for name, c in assignment.items() if c.scheme != AS_LOADED.scheme)
        return hashlib.sha256(f"{self.reference.text.hash} {num_sequences} {changed}".encode()).hexdigest()[:32]


def with_error(effects: Effects) -> MeasuredKl:
    """Mean KL, as a ratio of sums, and its standard error by how far sequences deviate from it."""
    mean, count = effects.mean_kl, len(effects.kl)
    if count < 2 or mean <= 0:
        return MeasuredKl(kl=mean, relative_error=0.0)
    deviations = effects.kl - mean * effects.num_scored
    variance = count / (count - 1) * float((deviations**2).sum())
    return MeasuredKl(kl=mean, relative_error=math.sqrt(variance) / (mean * float(effects.num_scored.sum())))
