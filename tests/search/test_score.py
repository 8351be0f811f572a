"""Scores against closed forms: autograd by hand, torch's KL divergence, and measured KLs of small errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.models import find_sites, site_weight
from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site
from bitwright.quantize import ROUNDINGS, SCHEMES, dequantize, fake_quantize, quantize
from bitwright.quantize import seen as seen_module
from bitwright.search import score as score_module
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.compare import compare, run_logits, run_reference
from bitwright.search.joint_fits import seen_at
from bitwright.search.quantizer import Quantizer
from bitwright.search.recorder import Inputs, MatrixStatistics, Statistics
from bitwright.search.score import score

N, K, T = 24, 16, 96


class Softmax(nn.Module):
    """p(· | x) = softmax(W x): the Fisher information of W is known in closed form."""

    def __init__(self, weight_NK: Tensor) -> None:
        super().__init__()
        self.map = nn.Linear(K, N, bias=False)
        self.map.weight = nn.Parameter(weight_NK, requires_grad=False)


SITE = Site(
    name="map",
    kind="weight",
    role="mlp.down",
    module="map",
    parameter="map.weight",
    rows=None,
    expert=None,
    transposed=False,
    tied_group=None,
    shape=(N, K),
    uses=("map",),
)


def softmax_statistics(
    seed: int = 0, num_tokens: int = T, window_tokens: int = 32
) -> tuple[Softmax, Statistics, Tensor, Tensor]:
    """The model, its statistics, and in fp32: x [T, K] and g = one-hot(y) − p by hand, y sampled."""
    generator = torch.Generator().manual_seed(seed)
    model = Softmax(torch.randn(N, K, generator=generator) * 0.5)
    # numbers that bf16 holds exactly, so that statistics lose nothing
    x_TK = torch.randn(num_tokens, K, generator=generator).bfloat16().float()
    logits = x_TK @ model.map.weight.T
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    leaf = logits.clone().requires_grad_(True)
    (g_TN,) = torch.autograd.grad(leaf.log_softmax(-1).gather(-1, labels).sum(), leaf)
    rows = torch.arange(0, num_tokens, 2)
    inputs = Inputs(x_TK=x_TK.bfloat16(), unrounded_RK=x_TK[rows], unrounded_rows=rows)
    matrix = MatrixStatistics(inputs=inputs, g_TN=g_TN.bfloat16())
    statistics = Statistics(
        num_scored=num_tokens,
        matrices={"map.weight": matrix},
        embeddings={},
        heads={},
        window_tokens=window_tokens,
    )
    return model, statistics, x_TK, g_TN


def quantizer_of(sites: Sequence[Site]) -> Quantizer:
    return Quantizer(shapes={site.name: site.shape for site in sites})


def rounding_error(weight_NK: Tensor, candidate: Candidate) -> Tensor:
    """Q(W) − W of a rounding that needs no data."""
    scheme = SCHEMES[candidate.scheme].weights
    assert scheme is not None
    return ROUNDINGS[candidate.rounding].quantize(weight_NK, scheme, None).dequantize() - weight_NK


def scores_of(model: nn.Module, statistics: Statistics, *candidates: Candidate) -> dict[Candidate, float]:
    sites = [SITE]
    (found,) = score(model, sites, statistics, quantizer_of(sites), candidates)
    return found.kl


def error_of(model: Softmax, scheme: str) -> Tensor:
    """E by the quantiser, which has tests of its own."""
    weights = SCHEMES[scheme].weights
    assert weights is not None
    return dequantize(quantize(model.map.weight, weights)) - model.map.weight


@pytest.mark.parametrize("scheme", ["int4_g32", "int3_g64", "int8_w", "fp6_w"])
def test_windows_of_one_token_are_the_per_token_form(scheme: str) -> None:
    """½ E[(gᵀ E x)²], token by token in float64."""
    model, statistics, x_TK, g_TN = softmax_statistics(window_tokens=1)
    found = scores_of(model, statistics, Candidate(scheme=scheme))
    error = error_of(model, scheme).double()
    per_token = torch.einsum("tn,nk,tk->t", g_TN.double(), error, x_TK.double())
    assert found[Candidate(scheme=scheme)] == pytest.approx(float(0.5 * per_token.square().mean()), rel=0.01)


@pytest.mark.parametrize(("num_tokens", "width"), [(96, 32), (100, 32), (31, 32), (300, 2), (300, 128)])
def test_windows_sum_before_they_square(num_tokens: int, width: int) -> None:
    """⟨D_w, E⟩ = Σ_{t in w} g_tᵀ E x_t over windows of neighbouring tokens; the last one may be short."""
    model, statistics, x_TK, g_TN = softmax_statistics(num_tokens=num_tokens, window_tokens=width)
    found = scores_of(model, statistics, Candidate(scheme="int4_g32"))[Candidate(scheme="int4_g32")]
    per_token = torch.einsum("tn,nk,tk->t", g_TN.double(), error_of(model, "int4_g32").double(), x_TK.double())
    windows = [float(part.sum()) ** 2 for part in per_token.split(width)]
    assert found == pytest.approx(0.5 * sum(windows) / num_tokens, rel=0.02)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms are held against products in fp32; one test says how far those in bf16 may lie off."""
    for module in (score_module, seen_module):
        monkeypatch.setattr(module, "product_dtype", lambda: torch.float32)


def test_products_in_bf16_move_a_score_by_less_than_half_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few dozen windows; a single one may move by the rounding of bf16, 2^-8."""
    model, statistics, _, _ = softmax_statistics(num_tokens=40 * 32)
    candidates = candidates_of(["int4_g32", "int8_w", "bf16", "fp6_w"])
    exact = scores_of(model, statistics, *candidates)
    monkeypatch.setattr(score_module, "product_dtype", lambda: torch.bfloat16)
    rounded = scores_of(model, statistics, *candidates)
    assert rounded == pytest.approx(exact, rel=5e-3)
    assert rounded != exact
    for candidate in candidates:  # to the last bit here too
        assert scores_of(model, statistics, candidate)[candidate] == rounded[candidate]


def test_one_candidate_scores_as_it_does_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, or a cache filled by other schemes would give another plan; blocks of rows only to rounding."""
    model, statistics, _, _ = softmax_statistics()
    candidates = candidates_of(["int4_g32", "int8_w", "bf16", "fp6_w", "int4_g32_min"])
    together = scores_of(model, statistics, *candidates)
    for candidate in candidates:
        assert scores_of(model, statistics, candidate)[candidate] == together[candidate]
    monkeypatch.setattr(score_module, "_BLOCK_NUMBERS", 1)
    monkeypatch.setattr(score_module, "_BLOCK_WINDOWS", 2)
    monkeypatch.setattr(score_module, "_ERROR_NUMBERS", 1)
    for candidate in candidates:
        alone = scores_of(model, statistics, candidate)
        assert alone[candidate] == pytest.approx(together[candidate], rel=1e-4)


def test_the_per_token_form_tends_to_the_true_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    """For independent tokens the form estimates E KL(softmax(W x) ‖ softmax((W + E) x)), here from 20,000 of them."""
    monkeypatch.setattr(score_module, "_MAX_TOKENS", 20_000)
    model, statistics, x_TK, _ = softmax_statistics(num_tokens=20_000, window_tokens=1)
    candidate = Candidate(scheme="int4_g32")
    found = scores_of(model, statistics, candidate)[candidate]
    weight = model.map.weight.double()
    log_p = (x_TK.double() @ weight.T).log_softmax(-1)
    log_q = (x_TK.double() @ (weight + error_of(model, "int4_g32").double()).T).log_softmax(-1)
    kl = float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))
    assert found == pytest.approx(kl, rel=0.08)


@pytest.mark.parametrize("width", [1, 32])
def test_of_many_windows_some_stand_for_all(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Every second, third … window, by the closed form over just those."""
    monkeypatch.setattr(score_module, "_MAX_WINDOWS", 10)
    monkeypatch.setattr(score_module, "_MAX_TOKENS", 10 * width)
    model, statistics, x_TK, g_TN = softmax_statistics(num_tokens=40 * width, window_tokens=width)
    found = scores_of(model, statistics, Candidate(scheme="int4_g32"))[Candidate(scheme="int4_g32")]
    per_token = torch.einsum("tn,nk,tk->t", g_TN.double(), error_of(model, "int4_g32").double(), x_TK.double())
    windows = per_token.reshape(40, width).sum(1)[::4]
    assert found == pytest.approx(0.5 * float(windows.square().mean()) / width, rel=0.02)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp4"])
def test_rounding_the_inputs_adds_their_own_share(scheme: str) -> None:
    """Score = the weights' share + ½ E[(uᵀ δ)²] with u = Wᵀ g, over the tokens that are kept unrounded."""
    model, statistics, x_TK, g_TN = softmax_statistics(window_tokens=1)
    found = scores_of(model, statistics, Candidate(scheme=scheme))[Candidate(scheme=scheme)]
    activations = SCHEMES[scheme].activations
    assert activations is not None
    error = error_of(model, scheme).double()
    weights_share = 0.5 * torch.einsum("tn,nk,tk->t", g_TN.double(), error, x_TK.double()).square().mean()
    kept = statistics.matrices["map.weight"].inputs.unrounded_rows
    delta = (fake_quantize(x_TK[kept], activations) - x_TK[kept]).double()
    change = torch.einsum("tn,nk,tk->t", g_TN[kept].double(), model.map.weight.double(), delta)
    expected = float(weights_share + 0.5 * change.square().mean())
    assert found == pytest.approx(expected, rel=0.01)
    assert found > float(weights_share)


def test_an_overflowing_format_has_no_finite_score() -> None:
    """fp16 ends at 65504: inputs beyond it make its score unusable, and no other's."""
    model, statistics, _, _ = softmax_statistics()
    statistics.matrices["map.weight"].inputs.unrounded_RK[3, 2] = 1e6
    found = scores_of(model, statistics, Candidate(scheme="fp16"), Candidate(scheme="bf16"))
    assert not np.isfinite(found[Candidate(scheme="fp16")])
    assert np.isfinite(found[Candidate(scheme="bf16")])


def test_moments_weigh_tokens_by_their_gradient() -> None:
    """The diagonal of H = E[w x xᵀ] with w = ‖g‖² / mean ‖g‖², in float64."""
    _, statistics, x_TK, g_TN = softmax_statistics()
    seen = seen_at(SITE, "map.weight", statistics)
    assert seen is not None
    moment = seen.moment
    weights = g_TN.double().square().sum(-1)
    weights /= weights.mean()
    expected = torch.einsum("t,tk,tj->kj", weights, x_TK.double(), x_TK.double()) / T
    block = moment.blocks[0]
    torch.testing.assert_close(block[:K, :K].double(), expected, rtol=0.02, atol=0.02)
    assert float(block[K:].abs().max()) == float(block[:, K:].abs().max()) == 0


# --- whole models ----------------------------------------------------------------------------------------------------


def measured_kl(model: Any, text: Any, change: Callable[[Any], None]) -> float:
    reference = run_reference(model, text, NoStage())
    changed = copy.deepcopy(model)
    change(changed)
    return compare(reference, lambda ids: run_logits(changed, ids), NoStage()).mean_kl


def test_predictions_agree_with_measurements_on_a_model(make_tiny_model: Callable[..., Any]) -> None:
    """Small errors (int8 and 4 bits) at every decoder site of a tiny Llama, 2,000 tokens: each within a factor of 2.5,
    the median within 25 %."""
    model, text = make_tiny_model("llama"), random_text(64, 32)
    sites = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    candidates = (Candidate(scheme="int8_w"), Candidate(scheme="int4_g32"))
    ratios = []
    for at in score(model, sites, statistics, quantizer_of(sites), candidates):
        site, found = at.site, at.kl
        for candidate in candidates:
            error = rounding_error(site_weight(model, site).contiguous(), candidate)

            def change(changed: Any, site: Site = site, error: Tensor = error) -> None:
                site_weight(changed, site).add_(error)

            ratios.append(found[candidate] / measured_kl(model, text, change))
    assert len(ratios) == 2 * 14
    assert 0.75 <= float(np.median(ratios)) <= 1.25
    assert min(ratios) > 0.4 and max(ratios) < 2.5


@pytest.mark.parametrize("scheme", ["int4_g32", "int8_w", "fp8", "bf16"])
def test_the_head_is_scored_by_the_kl_itself(make_tiny_model: Callable[..., Any], scheme: str) -> None:
    """Against torch's kl_div in float64 on all inputs of the head (fewer than are kept at most)."""
    model, text = make_tiny_model("llama"), random_text(16, 16)
    sites = [site for site in find_sites(model) if site.role == "lm_head"]
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    candidate = Candidate(scheme=scheme)
    (at,) = score(model, sites, statistics, quantizer_of(sites), [candidate])
    found = at.kl
    captured: list[Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    model(input_ids=text.input_ids, use_cache=False)
    handle.remove()
    x = captured[0].flatten(0, 1)
    chosen = SCHEMES[scheme]
    assert chosen.weights is not None
    weight = model.lm_head.weight
    rounded = dequantize(quantize(weight, chosen.weights)).double()
    inputs = x if chosen.activations is None else fake_quantize(x, chosen.activations)
    log_p, log_q = (x.double() @ weight.double().T).log_softmax(-1), (inputs.double() @ rounded.T).log_softmax(-1)
    kl = float(F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))
    assert found[candidate] == pytest.approx(kl, rel=0.02, abs=2e-7)


def test_a_tied_head_also_carries_the_embedding(make_tiny_model: Callable[..., Any]) -> None:
    """The prediction for both uses of one weight against the KL measured with both changed."""
    model, text = make_tiny_model("qwen2"), random_text(64, 16)
    sites = [site for site in find_sites(model) if site.role == "lm_head"]
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    candidate = Candidate(scheme="int8_w")
    (at,) = score(model, sites, statistics, quantizer_of(sites), [candidate])
    site, found = at.site, at.kl
    error = rounding_error(site_weight(model, site), candidate)
    measured = measured_kl(model, text, lambda changed: changed.lm_head.weight.add_(error))
    assert found[candidate] == pytest.approx(measured, rel=0.5)


def test_an_embedding_is_scored_by_the_rows_it_reads(make_tiny_model: Callable[..., Any]) -> None:
    """Rows that no token reads cost nothing; the others agree with the measured KL."""
    model, text = make_tiny_model("llama"), random_text(64, 16, vocabulary=40)
    sites = [site for site in find_sites(model) if site.role == "embedding"]
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    candidate = Candidate(scheme="int8_w")
    (at,) = score(model, sites, statistics, quantizer_of(sites), [candidate])
    site, found = at.site, at.kl
    error = rounding_error(site_weight(model, site), candidate)
    measured = measured_kl(model, text, lambda changed: site_weight(changed, site).add_(error))
    assert found[candidate] == pytest.approx(measured, rel=0.5)
    site_weight(model, site)[40:].mul_(1000)
    (again,) = score(model, sites, statistics, quantizer_of(sites), [candidate])
    assert again.kl[candidate] == found[candidate]


def test_fused_rows_and_experts_each_have_their_score(make_tiny_model: Callable[..., Any]) -> None:
    """Every decoder site of Phi-3 and Mixtral: only its own rows of the gradient, only its own expert's tokens."""
    for architecture in ("phi3", "mixtral"):
        model, text = make_tiny_model(architecture), random_text(16, 16)
        sites = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
        statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
        candidate = Candidate(scheme="int4_g32")
        found = {
            at.site.name: at.kl[candidate] for at in score(model, sites, statistics, quantizer_of(sites), [candidate])
        }
        assert set(found) == {site.name for site in sites}
        for matrix in matrices_of(sites):
            statistic = statistics.matrices[matrix.name]
            for site in matrix.sites:
                first, last = site.rows or (0, site.shape[0])
                error = rounding_error(site_weight(model, site).contiguous(), candidate)
                g_TN, x_TK = statistic.g_TN[:, first:last].double(), statistic.inputs.x_TK.double()
                per_token = ((g_TN @ error.double()) * x_TK).sum(-1)
                windows = torch.stack([part.sum() for part in per_token.split(32)])
                expected = float(0.5 * windows.square().sum() / statistics.num_scored)
                assert found[site.name] == pytest.approx(expected, rel=1e-3), site.name
