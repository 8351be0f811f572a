"""What calibration saw of a site, and the transforms that several sites have in common.

Rows of a fused matrix need one and the same where inputs are rounded; and so do all that read a norm which takes the
factors (`choices.py`), whatever they round. Such a transform is fitted to all their rows, one matrix above the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import SCHEMES, TRANSFORMS
from bitwright.quantize.fitted import Fitted
from bitwright.quantize.seen import Seen
from bitwright.search.candidate import Candidate
from bitwright.search.recorder import Statistics


def seen_at(site: Site, matrix_name: str, statistics: Statistics, tokens: slice = slice(None)) -> Seen | None:
    """What calibration saw of one site; None where no token reached it.

    A token reads its row of an embedding as it is: what an error of a row meets are the gradients at its output.
    """
    width = statistics.window_tokens
    if matrix_name in statistics.heads:
        return Seen(x_TK=statistics.heads[matrix_name][tokens], window_tokens=width)
    if matrix_name in statistics.embeddings:
        return Seen(x_TK=statistics.embeddings[matrix_name].g_TH[tokens], window_tokens=width)
    found = statistics.matrices.get(matrix_name)
    if found is None:
        return None
    first, last = site.rows or (0, found.g_TN.shape[1])
    return Seen(x_TK=found.inputs.x_TK[tokens], g_TN=found.g_TN[tokens, first:last], window_tokens=width)


class JointFits:
    """Transforms that several sites have in common.

    Args:
        model: whose weights are fitted.
        sites: all that are scored.
        statistics: what calibration saw of them.
        shared: site → norm that takes its factors.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], statistics: Statistics, shared: Mapping[str, str]
    ) -> None:
        self._model = model
        self._statistics = statistics
        self._shared = shared
        self._matrix_of = {site.name: matrix.name for matrix in matrices_of(sites) for site in matrix.sites}
        #: What joins sites → those.
        self._members: dict[str, list[Site]] = {}
        for site in sites:
            self._members.setdefault(self._joint(site), []).append(site)
        self._found: dict[tuple[str, str, str], Fitted] = {}

    def fitted(self, site: Site, choice: Candidate) -> Fitted | None:
        """None where the site fits its own."""
        scheme, transform = SCHEMES[choice.scheme], TRANSFORMS[choice.transform]
        members = self._members[self._joint(site)]
        is_common = scheme.activations is not None or site.name in self._shared
        if len(members) == 1 or not is_common or not transform.parts:
            return None
        key = (self._joint(site), choice.scheme, choice.transform)
        if key not in self._found:
            weights = torch.cat([site_weight(self._model, member) for member in members])
            found = (seen_at(member, self._matrix_of[member.name], self._statistics) for member in members)
            parts = [seen for seen in found if seen is not None]
            gradients = [seen.g_TN for seen in parts if seen.g_TN is not None]
            seen = replace(parts[0], g_TN=torch.cat(gradients, dim=1)) if parts else None
            self._found[key] = transform.fit(weights, scheme, seen)
        return self._found[key]

    def _joint(self, site: Site) -> str:
        norm = self._shared.get(site.name)
        return f"matrix {self._matrix_of[site.name]}" if norm is None else f"norm {norm}"
