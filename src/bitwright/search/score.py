"""The KL that a choice will cost, without another forward pass.

Near the reference, KL is half the Fisher quadratic form. An error E = Q(W) − W of one weight matrix shifts the output
at token t by E x_t, and so the text's log-likelihood, to first order, by

    s_t = g_tᵀ E x_t        and        KL per token ≈ ½ E[(Σ_t s_t)²] / tokens

E is one and the same at every token, so the s_t of neighbouring tokens are correlated: dropping the products between
tokens (the per-token form ½ E[s_t²]) misjudged q by × 0.6 and v by × 0.3 … 2. Summing over whole sequences keeps all
products, but leaves few independent samples. Windows of 32 tokens keep what matters and leave enough of them; they
predicted measured single-site KLs best of all forms tried (docs/decisions/0002). Per window w the gradient of the
weight is formed once,

    D_w = Σ_{t in w} g_t x_tᵀ [N, K],        s_w = ⟨D_w, E⟩        KL ≈ ½ Σ_w s_w² / scored tokens

and then serves every scheme: one more costs its quantisation and one dot product per window.

Rounding an input gives errors δ_t that are independent from token to token. With u_t = Wᵀ g_t their share is
½ E[(u_tᵀ δ_t)²], added to the weights' share.

The head needs no expansion: KL(softmax(W x) ‖ softmax(Q(W) x)) is computed as it stands, on a sample of its inputs.

Legend: T tokens, N outputs, K inputs, C candidates, R sampled tokens, W windows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import ROUNDINGS, SCHEMES, fake_quantize
from bitwright.quantize.moment import InputMoment
from bitwright.quantize.scheme import TensorScheme
from bitwright.search.calibrate import EmbeddingStatistics, MatrixStatistics, Statistics

#: Tokens whose errors are summed before squaring.
WINDOW_TOKENS = 32
#: Numbers of window gradients formed at once: they stay in the cache while all candidates read them.
_BLOCK_NUMBERS = 4 << 20
#: Errors multiplied at once; see `_window_kls`.
_ERROR_BATCH = 16
#: fp32 numbers of candidate errors held at once.
_ERROR_NUMBERS = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Candidate:
    """A choice that can be made at a site."""

    scheme: str
    rounding: str = "rtn"
    transform: str = "none"

    def __str__(self) -> str:
        return self.scheme if self.rounding == "rtn" else f"{self.scheme} {self.rounding}"


#: site name → candidate → predicted KL, nats per token, before probes correct it. NaN: the candidate is unusable there.
Scores = dict[str, dict[Candidate, float]]


def candidates_of(schemes: Sequence[str]) -> tuple[Candidate, ...]:
    """Every scheme with every rounding that applies to it."""
    found = []
    for name in schemes:
        weights = SCHEMES[name].weights
        assert weights is not None, f"{name} is no choice"
        found += [
            Candidate(scheme=name, rounding=rounding.name)
            for rounding in sorted(ROUNDINGS.values(), key=lambda r: (r.needs_data, r.name))
            if rounding.applies_to(weights)
        ]
    return tuple(found)


def score(
    model: nn.Module,
    sites: Sequence[Site],
    statistics: Statistics,
    moments: Mapping[str, InputMoment],
    candidates: Sequence[Candidate],
) -> Iterator[tuple[Site, dict[Candidate, float]]]:
    """Predicted KL of every candidate at every site that calibration reached, site by site.

    A site that no calibration token reached is left out: nothing can be said of it.
    """
    for matrix in matrices_of(sites):
        for site in matrix.sites:
            moment = moments.get(site.name)
            if moment is None:
                continue
            weight_NK = site_weight(model, site)
            if site.role == "lm_head":
                yield site, _score_head(weight_NK, statistics, matrix.name, moment, candidates)
            elif matrix.name in statistics.embeddings:
                found = statistics.embeddings[matrix.name]
                yield site, _score_embedding(weight_NK, found, moment, statistics.num_scored, candidates)
            else:
                linear = statistics.matrices[matrix.name]
                yield site, _score_linear(weight_NK, site, linear, moment, statistics.num_scored, candidates)


def site_moments(sites: Sequence[Site], statistics: Statistics) -> dict[str, InputMoment]:
    """Site → what clip search weighs its errors with; sites that calibration did not reach have none.

    Tokens count by the squared gradient at the site's own outputs; at the head all alike. A token reads its row of an
    embedding as it is, so every column of an error there counts alike.
    """
    moments = {}
    for matrix in matrices_of(sites):
        for site in matrix.sites:
            if matrix.name in statistics.heads:
                moments[site.name] = InputMoment.of(statistics.heads[matrix.name])
            elif matrix.name in statistics.embeddings:
                moments[site.name] = InputMoment.of(torch.ones(1, site.shape[1]))
            elif matrix.name in statistics.matrices:
                found = statistics.matrices[matrix.name]
                first, last = site.rows or (0, found.g_TN.shape[1])
                squares_T = found.g_TN[:, first:last].float().square().sum(-1)
                moments[site.name] = InputMoment.of(found.inputs.x_TK.float(), squares_T)
    return moments


def candidate_error(weight_NK: Tensor, candidate: Candidate, moment: InputMoment | None) -> Tensor:
    """E = Q(W) − W of one candidate, fp32 [N, K]."""
    scheme = SCHEMES[candidate.scheme].weights
    assert scheme is not None
    return ROUNDINGS[candidate.rounding].quantize(weight_NK, scheme, moment).dequantize() - weight_NK


def _score_linear(
    weight_NK: Tensor,
    site: Site,
    found: MatrixStatistics,
    moment: InputMoment,
    num_scored: int,
    candidates: Sequence[Candidate],
) -> dict[Candidate, float]:
    weight_NK = weight_NK.contiguous()
    first, last = site.rows or (0, found.g_TN.shape[1])
    g_TN = found.g_TN[:, first:last]
    scores = dict.fromkeys(candidates, 0.0)
    per_batch = max(1, _ERROR_NUMBERS // weight_NK.numel())
    for start in range(0, len(candidates), per_batch):
        batch = candidates[start : start + per_batch]
        errors = [candidate_error(weight_NK, c, moment) for c in batch]
        for candidate, kl in zip(batch, _window_kls(g_TN, found.inputs.x_TK, errors, num_scored), strict=True):
            scores[candidate] = kl
    shares = _activation_kls(weight_NK, g_TN, found, num_scored, candidates)
    return {c: kl + shares.get(SCHEMES[c.scheme].activations, 0.0) for c, kl in scores.items()}


def _window_kls(g_TN: Tensor, x_TK: Tensor, errors: Sequence[Tensor], num_scored: int) -> list[float]:
    """½ Σ_w ⟨D_w, E⟩² / num_scored for each error [N, K].

    Errors are multiplied in batches of one fixed width, filled up with zeros: the last bits of a score then do not
    depend on which others are asked for with it. The products are formed in bf16 where the processor has such
    instructions: a window sums thousands of them, and scores move by a tenth of a percent.
    """
    dtype = _product_dtype()
    num_outputs, num_inputs = errors[0].shape
    g_WtN, x_WtK = _windows(g_TN.to(dtype)), _windows(x_TK.to(dtype))
    num_windows = g_WtN.shape[0]
    sums_WC = torch.zeros(num_windows, -(-len(errors) // _ERROR_BATCH) * _ERROR_BATCH)
    block = max(1, _BLOCK_NUMBERS // (num_windows * num_inputs))
    for row in range(0, num_outputs, block):
        gradient_WM = torch.bmm(g_WtN[:, :, row : row + block].transpose(1, 2), x_WtK).flatten(1)
        for first in range(0, len(errors), _ERROR_BATCH):
            columns = torch.zeros(_ERROR_BATCH, gradient_WM.shape[1], dtype=dtype)
            for column, error in zip(columns, errors[first : first + _ERROR_BATCH], strict=False):
                column.copy_(error[row : row + block].reshape(-1))
            sums_WC[:, first : first + _ERROR_BATCH] += gradient_WM @ columns.T
    kls_C = sums_WC.double().square().sum(0) / (2 * num_scored)
    return [float(kl) for kl in kls_C[: len(errors)]]


@functools.cache
def _product_dtype() -> torch.dtype:
    """bf16 where the processor multiplies it natively, else fp32."""
    capabilities = torch.cpu.get_capabilities()
    return torch.bfloat16 if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else torch.float32


def _windows(values_TD: Tensor) -> Tensor:
    """Cut [T, D] into [W, WINDOW_TOKENS, D], the last window filled up with zeros."""
    missing = -values_TD.shape[0] % WINDOW_TOKENS
    if missing:
        values_TD = torch.cat([values_TD, values_TD.new_zeros(missing, values_TD.shape[1])])
    return values_TD.reshape(-1, WINDOW_TOKENS, values_TD.shape[1])


def _activation_kls(
    weight_NK: Tensor, g_TN: Tensor, found: MatrixStatistics, num_scored: int, candidates: Sequence[Candidate]
) -> dict[TensorScheme | None, float]:
    """½ E[(u_tᵀ δ_t)²] of every activation scheme among the candidates."""
    wanted = {SCHEMES[c.scheme].activations for c in candidates} - {None}
    if not wanted:
        return {}
    inputs = found.inputs
    u_RK = g_TN[inputs.unrounded_rows].float() @ weight_NK
    per_sampled = g_TN.shape[0] / inputs.unrounded_rows.numel()
    shares: dict[TensorScheme | None, float] = {}
    for scheme in wanted:
        assert scheme is not None
        delta_RK = fake_quantize(inputs.unrounded_RK, scheme) - inputs.unrounded_RK
        change_R = (u_RK * delta_RK).sum(-1).double()
        shares[scheme] = float(change_R.square().sum()) * per_sampled / (2 * num_scored)
    return shares


def _score_embedding(
    weight_VH: Tensor,
    found: EmbeddingStatistics,
    moment: InputMoment,
    num_scored: int,
    candidates: Sequence[Candidate],
) -> dict[Candidate, float]:
    return {c: _embedding_kl(candidate_error(weight_VH, c, moment), found, num_scored) for c in candidates}


def _embedding_kl(error_VH: Tensor, found: EmbeddingStatistics, num_scored: int) -> float:
    change_T = (error_VH[found.ids_T] * found.g_TH.float()).sum(-1, keepdim=True)
    return float(_windows(change_T).sum((1, 2)).double().square().sum()) / (2 * num_scored)


def _score_head(
    weight_VH: Tensor,
    statistics: Statistics,
    matrix_name: str,
    moment: InputMoment,
    candidates: Sequence[Candidate],
) -> dict[Candidate, float]:
    """KL at the head itself; where the embedding is the same weight, its share comes on top."""
    x_RH = statistics.heads[matrix_name]
    log_p = (x_RH @ weight_VH.T).log_softmax(-1)
    p = log_p.exp()
    embedding = statistics.embeddings.get(matrix_name)
    scores = {}
    for candidate in candidates:
        error = candidate_error(weight_VH, candidate, moment)
        activations = SCHEMES[candidate.scheme].activations
        inputs = x_RH if activations is None else fake_quantize(x_RH, activations)
        log_q = (inputs @ (weight_VH + error).T).log_softmax(-1)
        scores[candidate] = float((p * (log_p - log_q)).sum(-1).double().mean())
        if embedding is not None:
            scores[candidate] += _embedding_kl(error, embedding, statistics.num_scored)
    return scores
