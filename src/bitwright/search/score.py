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
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site, site_weight
from bitwright.quantize import SCHEMES, fake_quantize
from bitwright.quantize.moment import InputMoment
from bitwright.quantize.scheme import TensorScheme
from bitwright.search.calibrate import EmbeddingStatistics, MatrixStatistics, Statistics
from bitwright.search.candidate import Candidate
from bitwright.search.quantizer import Quantizer

#: Tokens whose errors are summed before squaring.
WINDOW_TOKENS = 32
#: Numbers of window gradients formed at once: they stay in the cache while all candidates read them.
_BLOCK_NUMBERS = 4 << 20
#: Errors multiplied at once; see `_window_kls`.
_ERROR_BATCH = 16
#: fp32 numbers of candidate errors held at once.
_ERROR_NUMBERS = 128 << 20


#: site name → candidate → predicted KL, nats per token, before probes correct it. NaN: the candidate is unusable there.
Scores = dict[str, dict[Candidate, float]]


def score(
    model: nn.Module,
    sites: Sequence[Site],
    statistics: Statistics,
    quantizer: Quantizer,
    candidates: Sequence[Candidate],
) -> Iterator[tuple[Site, dict[Candidate, float]]]:
    """Predicted KL of every candidate at every site that calibration reached, site by site.

    A site that no calibration token reached is left out: nothing can be said of it.
    """
    for matrix in matrices_of(sites):
        for site in matrix.sites:
            if site.name not in quantizer.moments:
                continue
            weight_NK = site_weight(model, site).contiguous()

            def error_of(candidate: Candidate, site: Site = site, weight_NK: Tensor = weight_NK) -> Tensor:
                return quantizer.quantize(site.name, candidate, weight_NK).dequantize() - weight_NK

            if site.role == "lm_head":
                yield site, _score_head(weight_NK, error_of, statistics, matrix.name, candidates)
            elif matrix.name in statistics.embeddings:
                found = statistics.embeddings[matrix.name]
                yield site, {c: _embedding_kl(error_of(c), found, statistics.num_scored) for c in candidates}
            else:
                linear = statistics.matrices[matrix.name]
                yield site, _score_linear(weight_NK, error_of, site, linear, statistics.num_scored, candidates)


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


def _score_linear(
    weight_NK: Tensor,
    error_of: Callable[[Candidate], Tensor],
    site: Site,
    found: MatrixStatistics,
    num_scored: int,
    candidates: Sequence[Candidate],
) -> dict[Candidate, float]:
    first, last = site.rows or (0, found.g_TN.shape[1])
    g_TN = found.g_TN[:, first:last]
    scores = dict.fromkeys(candidates, 0.0)
    per_batch = max(1, _ERROR_NUMBERS // weight_NK.numel())
    for start in range(0, len(candidates), per_batch):
        batch = candidates[start : start + per_batch]
        errors = [error_of(candidate) for candidate in batch]
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


def _embedding_kl(error_VH: Tensor, found: EmbeddingStatistics, num_scored: int) -> float:
    change_T = (error_VH[found.ids_T] * found.g_TH.float()).sum(-1, keepdim=True)
    return float(_windows(change_T).sum((1, 2)).double().square().sum()) / (2 * num_scored)


def _score_head(
    weight_VH: Tensor,
    error_of: Callable[[Candidate], Tensor],
    statistics: Statistics,
    matrix_name: str,
    candidates: Sequence[Candidate],
) -> dict[Candidate, float]:
    """KL at the head itself; where the embedding is the same weight, its share comes on top."""
    x_RH = statistics.heads[matrix_name]
    log_p = (x_RH @ weight_VH.T).log_softmax(-1)
    p = log_p.exp()
    embedding = statistics.embeddings.get(matrix_name)
    scores = {}
    for candidate in candidates:
        error = error_of(candidate)
        activations = SCHEMES[candidate.scheme].activations
        inputs = x_RH if activations is None else fake_quantize(x_RH, activations)
        log_q = (inputs @ (weight_VH + error).T).log_softmax(-1)
        scores[candidate] = float((p * (log_p - log_q)).sum(-1).double().mean())
        if embedding is not None:
            scores[candidate] += _embedding_kl(error, embedding, statistics.num_scored)
    return scores
