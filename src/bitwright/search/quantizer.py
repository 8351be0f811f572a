"""Codes of every choice at every site, given what calibration learned of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from bitwright.inference import SiteRule
from bitwright.quantize import ROUNDINGS, SCHEMES, QTensor, quantize
from bitwright.quantize.moment import InputMoment
from bitwright.quantize.scaling import Scales
from bitwright.search.candidate import Candidate


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantizer:
    """Finds the codes of any choice; scales that took a search are found once."""

    #: Site → second moment of its inputs.
    moments: Mapping[str, InputMoment]
    _found: dict[tuple[str, Candidate], Scales] = field(default_factory=dict, repr=False)

    def quantize(self, site_name: str, choice: Candidate, weight_NK: Tensor) -> QTensor:
        """Codes of one site's fp32 weight [N, K]."""
        weights = SCHEMES[choice.scheme].weights
        assert weights is not None, "a site that stays as loaded has no codes"
        rounding = ROUNDINGS[choice.rounding]
        known = self._found.get((site_name, choice))
        if known is not None:
            return quantize(weight_NK, weights, scales=known)
        q = rounding.quantize(weight_NK, weights, self.moments.get(site_name))
        if rounding.needs_data:
            self._found[site_name, choice] = q.scales
        return q

    def rules(self, assignment: Mapping[str, Candidate]) -> dict[str, SiteRule]:
        """What `emulate` needs to run an assignment."""
        return {
            name: self._rule(name, choice)
            for name, choice in assignment.items()
            if SCHEMES[choice.scheme].weights is not None
        }

    def _rule(self, site_name: str, choice: Candidate) -> SiteRule:
        return SiteRule(
            quantize_weight=lambda weight_NK: self.quantize(site_name, choice, weight_NK).dequantize(),
            activations=SCHEMES[choice.scheme].activations,
        )
