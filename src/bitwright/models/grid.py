"""Do the weights already lie on a low-bit grid, because the checkpoint was quantised before?

Then a scheme can reproduce them exactly, which a plan must say: a comparison on such a model flatters that scheme.
In every group of a site all values must be ``minimum + code · step`` for integer codes: for a group with smallest
value lo and largest hi, some n ≤ 255 exists with ``step = (hi − lo) / n`` and every value within fp32 rounding of the
grid. (n is searched, not derived from the smallest gap, for a group need not use neighbouring codes.) Rounding means
what ``code · scale + minimum`` loses in fp32: 8 units in the last place of the group's largest magnitude. A group of
32 random fp32, bf16 or fp16 weights passes with a chance far below 1e-20, and every sampled group must pass.

Grids blurred by a later cast to 16 bits are not detected; nothing reproduces those exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bitwright.models.sites import Site, site_weight

#: Elements that share a grid, along in_features; None is a whole row. Larger first: the same bits, fewer scales.
GROUP_SIZES: tuple[int | None, ...] = (None, 128, 64, 32)
#: Finest grid looked for.
MAX_BITS = 8
#: Groups looked at in each site.
NUM_SAMPLED_GROUPS = 256
#: Groups that are tested on every n; they fix how fine a grid the other groups are tested on.
NUM_SCOUTS = 4
#: Values of n tried in one array operation.
NUM_TRIED_AT_ONCE = 15
#: Accepted distance from the grid, relative to the largest magnitude of the group.
TOLERANCE_RATIO = 8 * 2.0**-24
#: Share of the sites that must lie on the grid before it is reported.
MIN_SHARE_RATIO = 0.5


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The grid on which a model's decoder weights were found."""

    #: Bits of a code.
    bits: int
    #: Elements along in_features that share a step; None: a whole row.
    group: int | None
    #: True: values are code·scale + minimum. False: zero lies on the grid, (code − zero_point)·scale.
    has_minimum: bool
    #: Every sampled group uses the lowest and the highest code, so (max − min) / (2**bits − 1) recovers the step.
    full_span: bool
    #: Share of the decoder's sites that lie on the grid.
    share_ratio: float

    @property
    def scheme(self) -> str | None:
        """Name of the preset that reproduces the weights exactly, None where none is known to."""
        if self.bits != 4 or self.group is None or not self.full_span or self.share_ratio < 1:
            return None
        return f"int4_g{self.group}_{'min' if self.has_minimum else 'zp'}"

    def describe(self) -> str:
        """One sentence for a plan's notes."""
        form = "code·scale + minimum" if self.has_minimum else "(code − zero_point)·scale"
        subject = "weights" if self.share_ratio == 1 else f"weights of {self.share_ratio:.0%} of the decoder's sites"
        where = "per row" if self.group is None else f"of {self.group}"
        ending = f": {self.scheme} reproduces them exactly" if self.scheme else ""
        return f"{subject} already lie on a {self.bits}-bit grid {where} ({form}){ending}"


@dataclass(frozen=True, kw_only=True)
class _Fit:
    group: int | None
    bits: int
    has_minimum: bool
    full_span: bool


def detect_grid(model: nn.Module, sites: Sequence[Site]) -> Grid | None:
    """Return the grid on which at least half of the decoder's sites lie, or None.

    Looks at up to 256 groups of each site, spread evenly (deterministic); embedding and head are left out.
    """
    decoder = [site for site in sites if site.role not in ("embedding", "lm_head")]
    fits = [fit for site in decoder if (fit := _fit_site(_sampled_rows(model, site))) is not None]
    if not fits or len(fits) < MIN_SHARE_RATIO * len(decoder):
        return None
    groups = [fit.group for fit in fits]
    group = max(GROUP_SIZES, key=groups.count)
    chosen = [fit for fit in fits if fit.group == group]
    if len(chosen) < MIN_SHARE_RATIO * len(decoder):
        return None
    bits = max(fit.bits for fit in chosen)
    return Grid(
        bits=bits,
        group=group,
        has_minimum=any(fit.has_minimum for fit in chosen),
        full_span=all(fit.full_span and fit.bits == bits for fit in chosen),
        share_ratio=len(chosen) / len(decoder),
    )


def _sampled_rows(model: nn.Module, site: Site) -> np.ndarray:
    weight = site_weight(model, site).detach()
    rows = np.unique(np.linspace(0, site.shape[0] - 1, num=min(site.shape[0], NUM_SAMPLED_GROUPS)).astype(np.int64))
    return weight.numpy()[rows] if weight.dtype == torch.float32 else weight[rows].float().numpy()


def _fit_site(w_RI: np.ndarray) -> _Fit | None:  # R sampled rows, I in_features
    """The coarsest grid that holds the sampled rows, among equals the one of the largest groups; None if none does."""
    best: _Fit | None = None
    for group in GROUP_SIZES:
        fit = _fit_groups(_sampled_groups(w_RI, group), group)
        if fit is not None and (best is None or fit.bits < best.bits):
            best = fit
    return best


def _sampled_groups(w_RI: np.ndarray, group: int | None) -> np.ndarray:
    """Complete groups [S, group], from every part of the sampled rows."""
    num_rows, in_features = w_RI.shape
    if group is None:
        return w_RI
    per_row = in_features // group
    if per_row == 0 or group == in_features:
        return np.empty((0, group), dtype=w_RI.dtype)
    blocks = w_RI[:, : per_row * group].reshape(num_rows * per_row, group)
    picked = np.unique(np.linspace(0, len(blocks) - 1, num=min(len(blocks), NUM_SAMPLED_GROUPS)).astype(np.int64))
    return blocks[picked]


def _fit_groups(v_SG: np.ndarray, group: int | None) -> _Fit | None:
    v_SG = v_SG.astype(np.float64)
    v_SG = v_SG[v_SG.max(axis=1, initial=-np.inf) > v_SG.min(axis=1, initial=np.inf)]  # constant groups tell nothing
    if len(v_SG) == 0:
        return None
    finest = 2**MAX_BITS - 1
    if len(np.unique(v_SG[0])) > finest + 1 or _finest_scout(v_SG[:1], finest) is None:
        return None  # nearly every group of weights that lie on no grid ends here
    scouts = np.linspace(0, len(v_SG) - 1, num=min(len(v_SG), NUM_SCOUTS)).astype(np.int64)
    scouted = _finest_scout(v_SG[scouts], finest)
    if scouted is None:
        return None
    # one bit of slack: a scout may happen to miss the outermost codes
    steps_S = _steps_of_span(v_SG, min(finest, 2 ** (scouted.bit_length() + 1) - 1))
    if steps_S is None:
        return None
    bits = int(steps_S.max()).bit_length()
    lo_S, hi_S = v_SG.min(axis=1), v_SG.max(axis=1)
    step_S = (hi_S - lo_S) / steps_S
    zero_S = lo_S / step_S
    off_grid_S = np.abs(zero_S - np.round(zero_S)) * step_S
    tolerance_S = TOLERANCE_RATIO * np.maximum(np.abs(lo_S), np.abs(hi_S))
    return _Fit(
        group=group,
        bits=bits,
        has_minimum=bool((off_grid_S > tolerance_S).any()),
        full_span=bool((steps_S == 2**bits - 1).all()),
    )


def _finest_scout(v_SG: np.ndarray, finest: int) -> int | None:
    """The largest number of steps that one of a few groups needs, or None if one of them lies on no grid."""
    steps_S = _steps_of_span(v_SG, finest)
    return None if steps_S is None else int(steps_S.max())


def _steps_of_span(v_SG: np.ndarray, finest: int) -> np.ndarray | None:
    """For each group the smallest n so that all values are lo + code·(hi − lo)/n, or None if a group has no such n."""
    lo_S1, hi_S1 = v_SG.min(axis=1, keepdims=True), v_SG.max(axis=1, keepdims=True)
    span_S1 = hi_S1 - lo_S1
    place_SG = (v_SG - lo_S1) / span_S1
    tolerance_S = TOLERANCE_RATIO * np.maximum(np.abs(lo_S1), np.abs(hi_S1))[:, 0] / span_S1[:, 0]
    steps_S = np.zeros(len(v_SG), dtype=np.int64)
    open_S = np.arange(len(v_SG))
    for first in range(1, finest + 1, NUM_TRIED_AT_ONCE):
        n_N = np.arange(first, min(first + NUM_TRIED_AT_ONCE, finest + 1))
        codes_SNG = place_SG[open_S, None, :] * n_N[:, None]
        distance_SN = np.abs(codes_SNG - np.rint(codes_SNG)).max(axis=2)
        allowed_SN = tolerance_S[open_S, None] * n_N
        on_grid_SN = (distance_SN <= allowed_SN) & (allowed_SN < 0.05)  # half a step would let anything pass
        found_S = on_grid_SN.any(axis=1)
        steps_S[open_S[found_S]] = n_N[on_grid_SN.argmax(axis=1)[found_S]]
        open_S = open_S[~found_S]
        if len(open_S) == 0:
            return steps_S
    return None
