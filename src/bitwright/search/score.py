"""The KL that a choice will cost, without another forward pass.

Near the reference, KL is half the Fisher quadratic form. An error E = Q(W) − W of one weight matrix shifts the output
at token t by E x_t, and so the text's log-likelihood, to first order, by

    s_t = g_tᵀ E x_t        and        KL per token ≈ ½ E[(Σ_t s_t)²] / tokens

E is one and the same at every token, so the s_t of neighbouring tokens are correlated: dropping the products between
tokens (the per-token form ½ E[s_t²]) misjudged q by × 0.6 and v by × 0.3 … 2. Summing over whole sequences keeps all
products, but leaves few independent samples. Windows of 32 tokens keep what matters and leave enough of them; they
predicted measured single-site KLs best of all forms tried (docs/decisions/0002). Where a prediction is of a whole text
(the vector of an encoder), all its tokens move it together, and the window is the text. Per window w the gradient of
the weight is formed once,

    D_w = Σ_{t in w} g_t x_tᵀ [N, K],        s_w = ⟨D_w, E⟩        KL ≈ ½ Σ_w s_w² / scored tokens

and then serves every scheme: one more costs its quantisation and one dot product per window.

Codes that were found with this very text look better on it than they are: a rounding that lowers such a sum is scored
by it. `optimism.py` measures by how much, on text that codes did not see, and corrects by a factor.

A change of variables W x = W' x' (`quantize/fitted.py`) leaves an error of W' as the error restore(Q(W')) − W of W.
Rounding an input gives errors δ_t that are independent from token to token. With u_t = W'ᵀ g_t their share is
½ E[(u_tᵀ δ_t)²], added to the weights' share.

The head needs no expansion: KL(softmax(W x) ‖ softmax(Q(W) x)) is computed as it stands, on a sample of its inputs.

Legend: T tokens, N outputs, K inputs, C candidates, R sampled tokens, W windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bitwright.inference import SiteRule
from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import SCHEMES, TRANSFORMS
from bitwright.quantize.seen import Seen, product_dtype, windows
from bitwright.quantize.static_scales import find_static_scale, overflows, round_input
from bitwright.search.candidate import Candidate
from bitwright.search.joint_fits import JointFits, seen_at
from bitwright.search.quantizer import Quantizer
from bitwright.search.recorder import EmbeddingStatistics, Inputs, MatrixStatistics, Statistics

#: A score sums over so many windows, or tokens where that is more; beyond that evenly spaced ones stand for all. The
#: standard error of a site's score is then √(2 / windows), an eighth; twice the time would make it an eleventh.
_MAX_WINDOWS, _MAX_TOKENS = 128, 4096
#: Windows, and numbers of their gradients, formed at once: they stay in the cache while all candidates read them.
_BLOCK_WINDOWS = 64
_BLOCK_NUMBERS = 4 << 20
#: Errors multiplied at once; see `_window_kls`.
_ERROR_BATCH = 16
#: fp32 numbers of candidate errors held at once.
_ERROR_NUMBERS = 128 << 20


#: site name → candidate → predicted KL, nats per token, before probes correct it. NaN: the candidate is unusable there.
Scores = dict[str, dict[Candidate, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteScores:
    """What is predicted of every candidate at one site, per scored prediction."""

    site: Site
    #: Nats.
    kl: dict[Candidate, float]
    #: Numbers beyond their format, before the cast; a candidate without an entry has none.
    overflows: dict[Candidate, float] = field(default_factory=dict)


def score(
    model: nn.Module,
    sites: Sequence[Site],
    statistics: Statistics,
    quantizer: Quantizer,
    candidates: Sequence[Candidate],
    optimism: Mapping[tuple[str, Candidate], float] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Iterator[SiteScores]:
    """Predicted KL of every candidate at every site that calibration reached, site by site.

    A site that no calibration token reached is left out: nothing can be said of it. So is a candidate whose transform
    does nothing for the site's shape, or for an embedding. `optimism` (`optimism.py`) multiplies what weights cost, by
    role and candidate. Sites that `shared` names with one norm are fitted one set of factors.
    """
    joint = JointFits(model, sites, statistics, shared or {})
    for matrix in matrices_of(sites):
        seen_of = {site.name: seen_at(site, matrix.name, statistics) for site in matrix.sites}
        for site in matrix.sites:
            seen = seen_of[site.name]
            if seen is None:
                continue
            weight_NK = site_weight(model, site).contiguous()
            reads_rows = matrix.name in statistics.embeddings and matrix.name not in statistics.heads
            possible = [c for c in candidates if _is_possible(c, site, reads_rows)]
            runs = {c: quantizer.find(site.name, c, weight_NK, seen, joint.fitted(site, c)) for c in possible}
            yield _score_site(site, matrix.name, weight_NK, runs, statistics, seen, optimism or {})


def _is_possible(candidate: Candidate, site: Site, reads_rows: bool) -> bool:
    """Whether a transform can serve a site: rows that are only read out (an embedding) have no input to change."""
    transform = TRANSFORMS[candidate.transform]
    return transform.why_not(SCHEMES[candidate.scheme], site.shape) is None and not (reads_rows and transform.parts)


def _score_site(
    site: Site,
    matrix_name: str,
    weight_NK: Tensor,
    runs: Mapping[Candidate, SiteRule],
    statistics: Statistics,
    seen: Seen,
    optimism: Mapping[tuple[str, Candidate], float],
) -> SiteScores:
    def error_of(candidate: Candidate) -> Tensor:
        run = runs[candidate]
        return run.transform.restore(run.quantize_weight(weight_NK)) - weight_NK

    if site.role == "lm_head":
        return SiteScores(site=site, kl=_score_head(weight_NK, error_of, statistics, matrix_name, runs))
    if matrix_name in statistics.embeddings:
        found = statistics.embeddings[matrix_name]
        return SiteScores(site=site, kl={c: _embedding_kl(error_of(c), found, statistics) for c in runs})
    matrix = statistics.matrices[matrix_name]
    assert seen.g_TN is not None
    weights = weight_kls(seen, error_of, list(runs), weight_NK.numel(), statistics.num_scored)
    inputs = {c: _input_effect(weight_NK, seen.g_TN, matrix, run, statistics.num_scored) for c, run in runs.items()}
    return SiteScores(
        site=site,
        kl={c: weights[c] * optimism.get((site.role, c), 1.0) + inputs[c].kl for c in runs},
        overflows={c: inputs[c].overflows for c in runs if inputs[c].overflows > 0},
    )


def weight_kls(
    seen: Seen,
    error_of: Callable[[Candidate], Tensor],
    candidates: Sequence[Candidate],
    num_weights: int,
    num_scored: int,
) -> dict[Candidate, float]:
    """½ Σ_w ⟨D_w, E⟩² / num_scored of the weight error of every candidate."""
    assert seen.g_TN is not None
    scores: dict[Candidate, float] = {}
    per_batch = max(1, _ERROR_NUMBERS // max(1, num_weights))
    for start in range(0, len(candidates), per_batch):
        batch = candidates[start : start + per_batch]
        errors = [error_of(candidate) for candidate in batch]
        scores |= zip(batch, _window_kls(seen, errors, num_scored), strict=True)
    return scores


def _window_kls(seen: Seen, errors: Sequence[Tensor], num_scored: int) -> list[float]:
    """½ Σ_w ⟨D_w, E⟩² / num_scored for each error [N, K].

    Errors are multiplied in batches of one fixed width, filled up with zeros: the last bits of a score then do not
    depend on which others are asked for with it. In bf16 (`product_dtype`) scores move by a tenth of a percent.
    """
    assert seen.g_TN is not None
    dtype = product_dtype()
    num_outputs, num_inputs = errors[0].shape
    x_TK = seen.x_TK[: seen.g_TN.shape[0]]
    g_WtN, x_WtK = (_some(windows(values, seen.window_tokens)).to(dtype) for values in (seen.g_TN, x_TK))
    num_windows = g_WtN.shape[0]
    sums_WC = torch.zeros(num_windows, -(-len(errors) // _ERROR_BATCH) * _ERROR_BATCH)
    block = max(1, _BLOCK_NUMBERS // (min(num_windows, _BLOCK_WINDOWS) * num_inputs))
    for row in range(0, num_outputs, block):
        rows = slice(row, min(row + block, num_outputs))
        columns_CM = torch.zeros(sums_WC.shape[1], (rows.stop - row) * num_inputs, dtype=dtype)
        for column, error in zip(columns_CM, errors, strict=False):
            column.copy_(error[rows].reshape(-1))
        for first in range(0, num_windows, _BLOCK_WINDOWS):
            part = slice(first, first + _BLOCK_WINDOWS)
            gradient_WM = torch.bmm(g_WtN[part, :, rows].transpose(1, 2), x_WtK[part]).flatten(1)
            for batch in range(0, sums_WC.shape[1], _ERROR_BATCH):
                some = slice(batch, batch + _ERROR_BATCH)
                sums_WC[part, some] += gradient_WM @ columns_CM[some].T
    share = num_windows / -(-seen.g_TN.shape[0] // seen.window_tokens)
    kls_C = sums_WC.double().square().sum(0) / (2 * num_scored * share)
    return [float(kl) for kl in kls_C[: len(errors)]]


def _some(windows_WtD: Tensor) -> Tensor:
    """As many windows as a score sums over, evenly spaced."""
    count, most = windows_WtD.shape[0], max(_MAX_WINDOWS, _MAX_TOKENS // windows_WtD.shape[1])
    return windows_WtD if count <= most else windows_WtD[torch.arange(most) * count // most]


@dataclass(frozen=True, kw_only=True, slots=True)
class _InputEffect:
    kl: float = 0.0
    overflows: float = 0.0


def _input_effect(
    weight_NK: Tensor, g_TN: Tensor, found: MatrixStatistics, run: SiteRule, num_scored: int
) -> _InputEffect:
    """½ E[(u_tᵀ δ_t)²] of rounding inputs, and the numbers that overflow, both per scored prediction."""
    scheme = run.activations
    if scheme is None:
        return _InputEffect()
    inputs = found.inputs
    num_tokens = g_TN.shape[0]
    u_RK = g_TN[inputs.unrounded_rows].float() @ run.transform.weight(weight_NK)
    changed_RK = run.transform.input(inputs.unrounded_RK)
    delta_RK = round_input(changed_RK, scheme, run.input_scale) - changed_RK
    squares = float((u_RK * delta_RK).sum(-1).double().square().sum())
    per_sampled = num_tokens / inputs.unrounded_rows.numel()
    return _InputEffect(
        kl=squares * per_sampled / (2 * num_scored),
        overflows=_expected_overflows(inputs, run, per_sampled) / num_scored,
    )


def _expected_overflows(inputs: Inputs, run: SiteRule, per_sampled: float) -> float:
    """Numbers of a text of this length that lie beyond the format, counted before the cast.

    A static scale that was found on these very inputs covers them. What other text will do is asked of one half of the
    text, under the scale of the other half; twice the text then halves what lies beyond it.
    """
    scheme = run.activations
    assert scheme is not None
    if run.input_scale is None:
        beyond = overflows(run.transform.input(inputs.unrounded_RK), scheme)
        return 0.0 if beyond is None else float(beyond.sum()) * per_sampled
    halves = inputs.x_TK.tensor_split(2)
    count = 0.0
    for known, other in (halves, halves[::-1]):
        if known.shape[0] and other.shape[0]:
            scale = find_static_scale(run.transform.input(known.float()), scheme)
            beyond = overflows(run.transform.input(other.float()), scheme, scale)
            count += 0.0 if beyond is None else float(beyond.sum())
    return count / 2


def _embedding_kl(error_VH: Tensor, found: EmbeddingStatistics, statistics: Statistics) -> float:
    change_T = (error_VH[found.ids_T] * found.g_TH.float()).sum(-1, keepdim=True)
    sums_W = windows(change_T, statistics.window_tokens).sum((1, 2))
    return float(sums_W.double().square().sum()) / (2 * statistics.num_scored)


def _score_head(
    weight_VH: Tensor,
    error_of: Callable[[Candidate], Tensor],
    statistics: Statistics,
    matrix_name: str,
    runs: Mapping[Candidate, SiteRule],
) -> dict[Candidate, float]:
    """KL at the head itself; where the embedding is the same weight, its share comes on top."""
    x_RH = statistics.heads[matrix_name]
    log_p = (x_RH @ weight_VH.T).log_softmax(-1)
    p = log_p.exp()
    embedding = statistics.embeddings.get(matrix_name)
    scores = {}
    for candidate, run in runs.items():
        error = error_of(candidate)
        inputs, weight = x_RH, weight_VH + error
        if run.activations is not None:
            inputs = round_input(run.transform.input(x_RH), run.activations, run.input_scale)
            weight = run.quantize_weight(weight_VH)
        log_q = (inputs @ weight.T).log_softmax(-1)
        scores[candidate] = float((p * (log_p - log_q)).sum(-1).double().mean())
        if embedding is not None:
            scores[candidate] += _embedding_kl(error, embedding, statistics)
    return scores
