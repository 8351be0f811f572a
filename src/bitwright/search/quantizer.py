"""Codes of every choice at every site: found once, with what calibration saw, and kept as a plan keeps them.

A choice that depended on data (codes of error feedback, scales of a clip search, a fitted transform, a static scale) is
kept as the tensors that a plan would hold for it (`emulation/site_rules.py`), and runs from them through its own
reader. So what is measured is, bit for bit, what a plan runs; measuring and writing plans find nothing again, and a
second budget finds everything in the cache. What lies in the cache is read when it is asked for; what is found anew
stays in memory, or goes to a spool.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bitwright.inference import SiteRule, input_tensors_of, rule_of, tensors_of
from bitwright.models.spool import Spool, SpooledArrays
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.rounding.stored import LEARNED
from bitwright.quantize.seen import Seen
from bitwright.quantize.static_scales import find_static_scale
from bitwright.search.cache import Cache
from bitwright.search.candidate import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    name: str
    shape: tuple[int, ...]
    scheme: str
    rounding: str
    transform: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantizer:
    """Finds the codes of any choice, and remembers those that took data."""

    #: Site → [N, K].
    shapes: Mapping[str, tuple[int, int]]
    cache: Cache = field(default_factory=lambda: Cache(folder=None))
    #: Where codes lie that were found anew; None: in memory.
    spool: Spool | None = None
    #: Site → tensors of codes that were found once every site had its scheme (`refine.py`), as a plan keeps them: they
    #: run in the place of those of the choice there.
    refined: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict, repr=False)
    #: What was found now, before what lies in the cache.
    _kept: dict[Candidate, ChainMap[str, np.ndarray]] = field(default_factory=dict, repr=False)

    def find(
        self, site_name: str, choice: Candidate, weight_NK: Tensor, seen: Seen | None, fitted: Fitted | None = None
    ) -> SiteRule:
        """Find what a choice runs with, or recall it.

        Args:
            site_name: the site.
            choice: what is chosen; its scheme stores weights.
            weight_NK: the site's weight as loaded, fp32 [N, K].
            seen: what calibration saw there; None where nothing is needed.
            fitted: the choice's transform, where it was fitted to more than this site's rows.
        """
        kept = self._of(choice)
        if _needs_data(choice) and not any(key in kept for key in _keys(site_name)):
            kept.update(found_tensors(site_name, choice, weight_NK, seen, fitted))
        return self._rule(site_name, choice)

    def tensors(self, site_name: str, choice: Candidate) -> dict[str, np.ndarray]:
        """What a plan keeps of a choice that was found: nothing where its codes follow from the weights alone."""
        kept = self.refined.get(site_name, self._of(choice))
        return {key: kept[key] for key in _keys(site_name) if key in kept}

    def values(self, site_name: str, choice: Candidate, weight_NK: Tensor) -> Tensor:
        """The effective weight of a choice, fp32 [N, K] in the space of the loaded one."""
        rule = self._rule(site_name, choice)
        return rule.transform.restore(rule.quantize_weight(weight_NK))

    def rules(self, assignment: Mapping[str, Candidate]) -> dict[str, SiteRule]:
        """What `emulate` needs to run an assignment."""
        return {
            name: self._rule(name, choice)
            for name, choice in assignment.items()
            if SCHEMES[choice.scheme].weights is not None
        }

    def write(self) -> None:
        """Keep everything that was found in the cache."""
        for choice, tensors in self._kept.items():
            if tensors.maps[0]:
                self.cache.write_found(choice, tensors)
                if self.cache.folder is not None:
                    self._kept[choice] = self._opened(choice)

    def _rule(self, site_name: str, choice: Candidate) -> SiteRule:
        refined = self.refined.get(site_name)
        chosen = _Chosen(
            name=site_name,
            shape=self.shapes[site_name],
            scheme=choice.scheme,
            rounding=choice.rounding if refined is None else LEARNED.name,
            transform=choice.transform,
        )
        rule = rule_of(chosen, self._of(choice) if refined is None else refined)
        assert rule is not None, "a site that stays as loaded has no codes"
        return rule

    def _of(self, choice: Candidate) -> ChainMap[str, np.ndarray]:
        if choice not in self._kept:
            self._kept[choice] = self._opened(choice) if _needs_data(choice) else ChainMap()
        return self._kept[choice]

    def _opened(self, choice: Candidate) -> ChainMap[str, np.ndarray]:
        known = self.cache.open_found(choice)
        # ChainMap writes to the first of its maps alone; its type asks for mutable ones throughout
        return ChainMap({} if self.spool is None else SpooledArrays(self.spool), known)  # type: ignore[arg-type]


@torch.no_grad()
def found_tensors(
    site_name: str, choice: Candidate, weight_NK: Tensor, seen: Seen | None, fitted: Fitted | None = None
) -> dict[str, np.ndarray]:
    """Fit the transform, find the codes and the static scale of a choice: what a plan keeps of them."""
    scheme, rounding = SCHEMES[choice.scheme], ROUNDINGS[choice.rounding]
    assert scheme.weights is not None
    if fitted is None:
        fitted = TRANSFORMS[choice.transform].fit(weight_NK, scheme, seen)
    changed = None if seen is None else seen.changed(fitted)
    kept: dict[str, np.ndarray] = {}
    if rounding.needs_data:
        kept |= tensors_of(site_name, rounding.quantize(fitted.weight(weight_NK), scheme.weights, changed))
    input_scale = None
    if scheme.static_activations:
        assert scheme.activations is not None and changed is not None
        input_scale = find_static_scale(changed.x_TK, scheme.activations)
    return kept | input_tensors_of(site_name, fitted, input_scale)


def _needs_data(choice: Candidate) -> bool:
    return (
        ROUNDINGS[choice.rounding].needs_data
        or bool(TRANSFORMS[choice.transform].parts)
        or SCHEMES[choice.scheme].static_activations
    )


def _keys(site_name: str) -> list[str]:
    parts = ("codes", "scales", "offsets", "tensor_scale", "column_scales", "signs", "input_scale")
    return [f"{site_name}/{part}" for part in parts]
