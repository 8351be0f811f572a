"""Error feedback against brute force, a plain loop written from GPTQ's paper, and closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize import ROUNDINGS, SCHEMES, QTensor, TensorScheme, quantize
from bitwright.quantize import seen as seen_module
from bitwright.quantize.curvature import Curvature
from bitwright.quantize.error_feedback import Effort, can_feed_back, feed_back
from bitwright.quantize.granularity import ROW, group
from bitwright.quantize.scheme import Scaling
from bitwright.quantize.seen import Seen

ALL = {
    name: scheme.weights
    for name, scheme in SCHEMES.items()
    if scheme.weights is not None and can_feed_back(scheme.weights)
}
EVERY = pytest.mark.parametrize("scheme", ALL.values(), ids=ALL.keys())
PLAIN = Effort(search_scales=False, num_refinements=0)


def inputs(columns: int, num_tokens: int = 600, seed: int = 0) -> Tensor:
    """Tokens [T, K] whose columns differ in size and depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(num_tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.rand(columns, generator=generator) / columns**0.5


def weights(rows: int, columns: int, seed: int = 1) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_t(4, (rows, columns)) * 0.02).astype(np.float32))


def damage(q: QTensor, w_NK: Tensor, matrix_KK: Tensor) -> np.ndarray:
    """eᵀ H e of every row, fp64 [N]."""
    error = (q.dequantize() - w_NK).double().numpy()
    return np.einsum("nk,kj,nj->n", error, matrix_KK.double().numpy(), error)


# --- the factors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 7, 200])
def test_factors_multiply_to_the_matrix(columns: int) -> None:
    x = inputs(columns)
    found = Curvature.of(x.T @ x / len(x))
    upper = found.feedback_KK.double() + torch.eye(columns)
    assert float(found.feedback_KK.tril().abs().max()) == 0
    product = (upper * found.pivots_K.double()) @ upper.T
    torch.testing.assert_close(product.float(), found.matrix_KK, rtol=1e-4, atol=1e-5)


def test_a_matrix_without_rank_is_raised() -> None:
    """Fewer tokens than columns, columns that are always zero, and no token at all."""
    x = inputs(64, num_tokens=5)
    x[:, 10:20] = 0
    for estimate in (x.T @ x, torch.zeros(64, 64)):
        found = Curvature.of(estimate)
        assert bool(torch.isfinite(found.feedback_KK).all()) and float(found.pivots_K.min()) > 0


# --- feedback ---------------------------------------------------------------------------------------------------------


def gptq_by_hand(w_NK: Tensor, matrix_KK: Tensor, step: float, top: int) -> np.ndarray:
    """Algorithm 1 of arXiv:2210.17323: with the upper Cholesky factor of the inverse, column by column."""
    inverse = np.linalg.inv(matrix_KK.double().numpy())
    factor = np.linalg.cholesky(inverse).T
    w = w_NK.double().numpy().copy()
    codes = np.empty_like(w)
    for k in range(w.shape[1]):
        codes[:, k] = np.clip(np.rint(w[:, k] / step), -top - 1, top)
        error = (w[:, k] - codes[:, k] * step) / factor[k, k]
        w[:, k:] -= np.outer(error, factor[k, k:])
    return codes


@pytest.mark.parametrize("columns", [40, 300])
def test_feedback_is_gptq(columns: int) -> None:
    """One scale a row, all scales equal: the codes of the paper's loop (a hair of rounding may move a few)."""
    w, x = weights(12, columns).clamp(-0.07, 0.07), inputs(columns)
    w[:, 0] = 0.07  # the largest of every row
    found = Curvature.of(x.T @ x / len(x))
    scheme = TensorScheme(format="int4", scaling=Scaling(granularity=ROW, scale_format="fp32"))
    q = feed_back(w, scheme, found, PLAIN)
    expected = gptq_by_hand(w, found.matrix_KK, 0.07 / 7, 7)
    assert (q.codes_NK.numpy() != expected).mean() < 0.005


def test_damage_is_the_sum_over_pivots() -> None:
    """eᵀ H e = Σ_k D_k (v_k − q_k)²: with codes of any row taken apart by hand."""
    w, x = weights(3, 30), inputs(30)
    found = Curvature.of(x.T @ x / len(x))
    q = feed_back(w, ALL["int4_g32"], found, PLAIN)
    error = (w - q.dequantize()).double()  # v_k − q_k = e_k + Σ_{j<k} e_j U_jk
    left = error @ (torch.eye(30, dtype=torch.float64) + found.feedback_KK.double())
    expected = (left.square() * found.pivots_K.double()).sum(1)
    assert damage(q, w, found.matrix_KK) == pytest.approx(expected.numpy(), rel=1e-4)


@EVERY
@pytest.mark.parametrize("columns", [256, 200])
def test_damage_falls_with_effort(scheme: TensorScheme, columns: int) -> None:
    """Feedback beats rounding to nearest, searching scales and refining beat feedback alone, in every format."""
    w, x = weights(24, columns), inputs(columns)
    found = Curvature.of(x.T @ x / len(x))
    nearest = damage(quantize(w, scheme), w, found.matrix_KK).sum()
    plain = damage(feed_back(w, scheme, found, PLAIN), w, found.matrix_KK).sum()
    full = damage(feed_back(w, scheme, found, Effort()), w, found.matrix_KK).sum()
    assert plain < 0.9 * nearest
    assert full < 0.95 * plain


@EVERY
def test_refinement_makes_no_row_worse(scheme: TensorScheme) -> None:
    w, x = weights(24, 192), inputs(192)
    found = Curvature.of(x.T @ x / len(x))
    before = damage(feed_back(w, scheme, found, Effort(num_refinements=0)), w, found.matrix_KK)
    after = damage(feed_back(w, scheme, found, Effort(num_refinements=2)), w, found.matrix_KK)
    assert (after <= before * (1 + 1e-4)).all()


def test_small_problems_come_close_to_brute_force() -> None:
    """Six columns of int2 under rtn's own scales: all 4^6 codes are tried."""
    scheme = TensorScheme(format="int2", scaling=Scaling(granularity=group(8), scale_format="fp32"))
    w, x = weights(40, 6), inputs(6)
    found = Curvature.of(x.T @ x / len(x))
    q = feed_back(w, scheme, found, Effort(search_scales=False, num_refinements=1, num_passes=5))
    assert q.scales_NG is not None
    codes = torch.tensor(list(itertools.product(range(-2, 2), repeat=6)), dtype=torch.float32)
    errors = codes.unsqueeze(0) * q.scales_NG.unsqueeze(-1) - w.unsqueeze(1)
    best = torch.einsum("nck,kj,ncj->nc", errors, found.matrix_KK, errors).amin(1).numpy()
    reached = damage(q, w, found.matrix_KK)
    assert (reached >= best * (1 - 1e-4)).all()
    assert reached.sum() < 1.15 * best.sum()


@EVERY
def test_codes_and_scales_are_storable(scheme: TensorScheme) -> None:
    w, x = weights(9, 160), inputs(160)
    q = ROUNDINGS["gradient_aware"].quantize(w, scheme, Seen(x_TK=x))
    assert scheme.scaling is not None and q.scales_NG is not None
    assert np.array_equal(formats.round(scheme.format, q.codes_NK.numpy()), q.codes_NK.numpy())
    stored = np.ldexp(q.scales_NG.numpy(), -scheme.scaling.element_exponent)
    assert np.array_equal(formats.round(scheme.scaling.scale_format, stored), stored)
    assert not q.follows_from_scales


@pytest.mark.parametrize("name", ["int4_g64", "nf4_g64", "int4_g32_min", "nvfp4", "int8_w"])
def test_rows_do_not_depend_on_each_other_nor_on_threads(name: str) -> None:
    w, x = weights(33, 192), inputs(192)
    found = Curvature.of(x.T @ x / len(x))
    together = feed_back(w, ALL[name], found, Effort(num_refinements=0)).dequantize()
    if name != "nvfp4":  # whose second scale belongs to the whole tensor
        alone = feed_back(w[7:8].contiguous(), ALL[name], found, Effort(num_refinements=0)).dequantize()
        assert (alone != together[7:8]).float().mean() < 0.02  # products of other shapes round differently
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = feed_back(w, ALL[name], found, Effort(num_refinements=0)).dequantize()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, together)


def test_rows_that_are_not_finite_harm_no_other() -> None:
    w, x = weights(5, 64), inputs(64)
    found = Curvature.of(x.T @ x / len(x))
    clean = feed_back(w[1:].contiguous(), ALL["int4_g32"], found, Effort()).dequantize()
    w[0, 3] = torch.nan
    spoiled = feed_back(w, ALL["int4_g32"], found, Effort()).dequantize()
    assert torch.equal(spoiled[1:], clean)
    assert torch.equal(spoiled[0].isnan(), quantize(w, ALL["int4_g32"]).dequantize()[0].isnan())


@pytest.mark.parametrize("name", ["gptq", "gradient_aware"])
def test_without_data_there_is_no_feedback(name: str) -> None:
    with pytest.raises(SchemeError, match=f"{name} needs .* rtn"):
        ROUNDINGS[name].quantize(weights(4, 32), ALL["int4_g32"], None)


def test_a_group_of_zeros_stays_zero() -> None:
    w = weights(4, 64)
    w[:, :32] = 0
    q = ROUNDINGS["gptq"].quantize(w, ALL["int4_g32"], Seen(x_TK=torch.randn(200, 64)))
    assert q.scales_NG is not None and float(q.scales_NG[:, 0].abs().max()) == 0
    assert float(q.dequantize()[:, :32].abs().max()) == 0


# --- what was seen ----------------------------------------------------------------------------------------------------


def faded(x: Tensor, g: Tensor, width: int) -> np.ndarray:
    """Σ (1 − |t − s| / n) (g_t · g_s) x_t x_sᵀ over pairs of tokens of a window of n, in float64.

    Of all runs of n tokens, 1 − |t − s| / n is the share that has both: each run inside a window (which nothing
    surrounds) adds its gradient's square ÷ n.
    """
    x_TK, g_TN = x.double().numpy(), g.double().numpy()
    total = np.zeros((x.shape[1], x.shape[1]))
    for start in range(0, len(g), width):
        for first in range(start - width + 1, min(start + width, len(g))):
            run = slice(max(start, first), min(first + width, start + width, len(g)))
            gradient = g_TN[run].T @ x_TK[run]
            total += gradient.T @ gradient / width
    return total


@pytest.mark.parametrize(("num_tokens", "width"), [(96, 32), (100, 32), (100, 1), (90, 45)])
def test_the_weighted_moment_is_that_of_window_gradients(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, width: int
) -> None:
    """Faded by distance, formed in float64; up to what the diagonal is raised by."""
    monkeypatch.setattr(seen_module, "product_dtype", lambda: torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(num_tokens, 20, generator=generator), torch.randn(num_tokens, 6, generator=generator)
    seen = Seen(x_TK=x, g_TN=g, window_tokens=width)
    expected = faded(x, g, width) / float(g.double().square().sum())
    found = seen.weighted.matrix_KK.double().numpy()
    off_diagonal = ~np.eye(20, dtype=bool)
    assert found[off_diagonal] == pytest.approx(expected[off_diagonal], rel=1e-4, abs=1e-5)
    raised = np.diag(found) - np.diag(expected)
    assert raised == pytest.approx(np.full(20, raised[0]), rel=1e-3)
    assert raised[0] == pytest.approx(0.3 * np.trace(expected) / 20, rel=1e-3)


@pytest.mark.parametrize("num_known", [1, 50, 64, 96])
def test_tokens_without_a_gradient_count_as_the_others_do_on_average(
    monkeypatch: pytest.MonkeyPatch, num_known: int
) -> None:
    """(faded sum + mean ‖g‖² Σ x xᵀ over the rest) ÷ (T mean ‖g‖²), in float64."""
    monkeypatch.setattr(seen_module, "product_dtype", lambda: torch.float32)
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(96, 20, generator=generator), torch.randn(num_known, 6, generator=generator)
    mean = float(g.double().square().sum()) / num_known
    rest = x[num_known:].double().numpy()
    expected = (mean * rest.T @ rest + faded(x[:num_known], g, 32)) / (96 * mean)
    seen = Seen(x_TK=x, g_TN=g)
    found = seen.weighted.matrix_KK.double().numpy()
    off_diagonal = ~np.eye(20, dtype=bool)
    assert found[off_diagonal] == pytest.approx(expected[off_diagonal], rel=1e-4, abs=1e-5)
    assert seen.token_weights_T is not None
    assert seen.token_weights_T[num_known:].tolist() == pytest.approx([mean] * (96 - num_known), rel=1e-5)


def test_products_in_bf16_move_the_moment_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By half a percent of √(H_ii H_jj) at most: a tenth of what another sample of as many tokens would."""
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(5000, 20, generator=generator), torch.randn(5000, 6, generator=generator)
    moments = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(seen_module, "product_dtype", lambda dtype=dtype: dtype)
        moments.append(Seen(x_TK=x.bfloat16(), g_TN=g.bfloat16()).weighted.matrix_KK)
    exact, rounded = moments
    sizes = exact.diagonal().sqrt()
    assert 0 < float(((rounded - exact) / sizes / sizes.unsqueeze(1)).abs().max()) < 5e-3


def test_wide_products_are_symmetric_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """More columns, and more tokens, than are multiplied at once."""
    monkeypatch.setattr(seen_module, "product_dtype", lambda: torch.float32)
    monkeypatch.setattr(seen_module, "_BLOCK_TOKENS", 16)
    x = torch.randn(50, 900, generator=torch.Generator().manual_seed(3))
    plain = Seen(x_TK=x).plain.matrix_KK
    expected = x.T @ x / 50
    off_diagonal = ~torch.eye(900, dtype=torch.bool)
    torch.testing.assert_close(plain[off_diagonal], expected[off_diagonal], rtol=1e-4, atol=1e-5)
    assert torch.equal(plain, plain.T)
