"""Predicted KL of rounded values: against measured KL on tiny models, and closed forms of what surrounds it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_search import NoStage, random_text
from value_models import make_value_model

from bitwright.inference import emulate_values
from bitwright.models import find_sites
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.quantize import SCHEMES, VALUE_SCHEMES, TensorScheme
from bitwright.quantize.granularity import ROW, TENSOR, group
from bitwright.quantize.scheme import Scaling
from bitwright.quantize.value_scheme import ValueScheme
from bitwright.search.cache import Cache
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.jumps import Jumps, fit_jumps
from bitwright.search.progress import Silent
from bitwright.search.value_learn import default_value_schemes, experts_per_token, learn_values
from bitwright.search.value_observer import SeenValues, ValueObserver
from bitwright.search.value_router import flip_kl, flip_share
from bitwright.search.value_scores import ValueLearned, sample_groups, score_values, value_candidates

TEXT = random_text(24, 64, vocabulary=256)


def learned_of(architecture: str, schemes: list[str]) -> tuple[Any, tuple[ValueSite, ...], ValueLearned]:
    model = make_value_model(architecture)
    value_sites, sites = find_value_sites(model), find_sites(model)
    observer = ValueObserver(
        model,
        value_sites,
        num_tokens=TEXT.input_ids.numel(),
        seed=0,
        groups=sample_groups(value_sites, schemes),
        sites=sites,
    )
    statistics = calibrate(model, sites, TEXT, seed=0, stage=NoStage(), observers=[observer])
    experts = getattr(model.config, "num_experts_per_tok", None)
    found = score_values(
        value_sites, observer.seen, schemes, num_scored=statistics.num_scored, experts_per_token=experts
    )
    return model, value_sites, found


def measured_kl(model: Any, sites: tuple[ValueSite, ...], learned: ValueLearned, chosen: dict[str, Candidate]) -> float:
    with torch.no_grad():
        log_p = model(TEXT.input_ids).logits[:, :-1].log_softmax(-1)
        with emulate_values(model, learned.rules(sites, chosen)):
            log_q = model(TEXT.input_ids).logits[:, :-1].log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).double().mean())


def worst_of_the_first_layer(architecture: str) -> list[tuple[float, float]]:
    """(predicted, measured) of sites of the first layer under the scheme that costs each most, one site at a time."""
    schemes = ["bf16_values", "int8_token", "fp8_e4m3_head", "int4_token", "int4_channel_g32", "fp8_e4m3_unit"]
    model, sites, learned = learned_of(architecture, schemes)
    roles = {"attn.qk", "attn.softmax", "attn.pv", "attn.output", "kv_cache", "residual", "norm"}
    pairs = []
    for site in sites:
        if site.layer == 0 and site.role in roles:
            of_site = learned.scores[site.name]
            worst = max(of_site, key=lambda c, of_site=of_site: of_site[c])
            pairs.append((of_site[worst], measured_kl(model, sites, learned, {site.name: worst})))
    assert len(pairs) >= 8
    return pairs


def test_predictions_follow_measurements() -> None:
    logs = torch.tensor(worst_of_the_first_layer("llama")).double().log().T
    assert float(torch.corrcoef(logs)[0, 1]) > 0.98
    ratios = (logs[1] - logs[0]).exp()
    assert 0.5 < float(ratios.min()) and float(ratios.max()) < 2.0


def test_in_a_mixture_kl_grows_with_the_root_of_what_is_predicted() -> None:
    pairs = worst_of_the_first_layer("mixtral")
    assert max(measured / predicted for predicted, measured in pairs) > 20
    jumps = fit_jumps(pairs)
    ratios = [measured / jumps.total(predicted) for predicted, measured in pairs]
    assert 1 / 3 < min(ratios) and max(ratios) < 3


def test_the_law_of_jumps_is_found_again() -> None:
    law = Jumps(c=0.1)
    pairs = [(s, law.total(s)) for s in (1e-6, 1e-4, 1e-2, 1.0)]
    assert fit_jumps(pairs).c == pytest.approx(0.1, rel=0.01)
    assert fit_jumps([(s, s) for s in (1e-6, 1e-2)]).c == 0.0
    assert fit_jumps([]) == Jumps(c=0.0)
    assert [law.smooth(total) for _, total in pairs] == pytest.approx([s for s, _ in pairs])
    # a unit step that noise of size σ pushes over its threshold: jumps are in proportion to σ, and σ² = 2 S
    draw = torch.Generator().manual_seed(0)
    margins = torch.rand(200_000, generator=draw) * 10
    shares = [float((torch.randn(200_000, generator=draw) * sigma > margins).double().mean()) for sigma in (0.1, 0.2)]
    assert shares[1] / shares[0] == pytest.approx(2, rel=0.1)


def test_a_changed_choice_of_experts_costs_more_than_its_gradient_says() -> None:
    model, sites, learned = learned_of("mixtral", ["bf16_values"])
    bf16 = Candidate(scheme="bf16_values")
    routers = [site for site in sites if site.role == "router"]
    predicted = sum(learned.scores[site.name][bf16] for site in routers)
    measured = measured_kl(model, sites, learned, {site.name: bf16 for site in routers})
    assert 0.2 < predicted / measured < 5, (predicted, measured)


def test_the_cost_of_swaps_is_that_of_experts_drawn_at_random() -> None:
    # two of many experts, effects c on the log-likelihood independent and alike: the closed form against drawing
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(100_000, 8, generator=draw)
    top, chosen = logits.topk(2, dim=-1)
    effects = torch.randn(100_000, 8, generator=draw)
    w, c = top.softmax(-1), effects.gather(-1, chosen)
    gradient = torch.zeros(100_000, 8).scatter_(-1, chosen, w * (c - (w * c).sum(-1, keepdim=True)))
    moved = logits + 0.05 * torch.randn(100_000, 8, generator=draw)
    now = moved.topk(2, dim=-1).indices
    lost = ~(chosen[:, 1:] == now).any(-1)  # the second of before is chosen no more
    other = effects.gather(-1, torch.where((now[:, :1] == chosen).any(-1, keepdim=True), now[:, 1:], now[:, :1]))
    expected = 0.5 * (w[:, 1] * (other.squeeze(-1) - c[:, 1])).square()[lost].sum()
    assert flip_share(logits, moved, 2) == pytest.approx(float(lost.double().mean()), rel=0.1)
    assert flip_kl(logits, moved, gradient, 2) == pytest.approx(float(expected), rel=0.25)
    assert flip_share(logits, logits, 2) == flip_kl(logits, logits, gradient, 2) == 0.0
    assert flip_share(logits, moved, 8) == 0.0
    assert math.isnan(flip_kl(logits, moved, gradient, 1))  # one expert has weight 1: no gradient tells


def test_static_scales_come_from_all_tokens() -> None:
    model, sites, learned = learned_of("llama", ["fp8_e4m3_head", "fp8_e4m3_tensor"])
    (site,) = (s for s in sites if s.name == "model.layers.0.self_attn:k_cache")
    with torch.no_grad():
        keys = model(TEXT.input_ids, use_cache=True).cache.layers[0].keys
    amax = keys.abs().amax((0, 2, 3))
    for scheme, expected in (("fp8_e4m3_head", amax / 448), ("fp8_e4m3_tensor", amax.amax(0, keepdim=True) / 448)):
        choice = Candidate(scheme=scheme)
        rule = learned.rules(sites, {site.name: choice})[site]
        torch.testing.assert_close(rule.scales["k"], expected, rtol=1e-4, atol=0)
        (name, kept), *others = learned.tensors_of(site, choice).items()
        assert name == f"{site.name}/scale" and torch.equal(torch.from_numpy(kept), rule.scales["k"]) and not others


def test_overflows_that_are_to_be_expected() -> None:
    values = torch.tensor([1.0, 7e4, -7e4, 3.0]).reshape(4, 1, 1)
    seen = SeenValues(
        num_seen=40, amax_H=torch.tensor([7e4]), batches=[(values, torch.ones(4, 1, 1), torch.full((4,), 10.0))]
    )
    (site,) = (s for s in find_value_sites(make_value_model("llama")) if s.name == "model.layers.0:residual")
    fp16, bf16 = Candidate(scheme="fp16_values"), Candidate(scheme="bf16_values")
    found = score_values([site], {(site.name, "h"): seen}, ["fp16_values", "bf16_values"], num_scored=20)
    assert found.overflows == {site.name: {fp16: 1.0}}  # 2 of 4 kept stand for 20 of 40, on 20 predictions
    assert found.scores[site.name][bf16] < math.inf


def test_kl_is_half_the_mean_square_of_first_order_shifts() -> None:
    draw = torch.Generator().manual_seed(1)
    values, g = torch.randn(6, 2, 4, generator=draw), torch.randn(6, 2, 4, generator=draw).bfloat16()
    seen = SeenValues(num_seen=12, amax_H=values.abs().amax((0, 2)), batches=[(values, g, torch.full((6,), 2.0))])
    (site,) = (s for s in find_value_sites(make_value_model("llama")) if s.name == "model.layers.0.self_attn:v_cache")
    token = Candidate(scheme="int8_token")
    found = score_values([site], {(site.name, "v"): seen}, ["int8_token"], num_scored=3)
    scale = values.abs().amax(-1, keepdim=True) / 127
    shift = (((values / scale).round() * scale - values) * g.float()).sum(-1)  # heads by themselves
    assert found.scores[site.name][token] == pytest.approx(0.5 * 2 * float(shift.square().sum()) / 3, rel=1e-5)


def test_a_second_search_finds_scores_and_scales_in_the_cache(tmp_path: Path) -> None:
    model = make_value_model("llama")
    sites, value_sites = find_sites(model), find_value_sites(model)
    options: dict[str, Any] = {"seed": 0, "cache": Cache(folder=tmp_path), "progress": Silent()}
    first = learn_values(model, sites, value_sites, TEXT, ["fp8_e4m3_head", "int8_token", "bf16"], **options)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # whoever ran the model now would find nothing but NaN
    second = learn_values(model, sites, value_sites, TEXT, ["fp8_e4m3_head", "int8_token"], **options)
    assert second.scores == first.scores and second.overflows == first.overflows
    head = Candidate(scheme="fp8_e4m3_head")
    for site in value_sites:
        if head in first.scores.get(site.name, {}):
            before, after = (learned.tensors_of(site, head) for learned in (first, second))
            assert before.keys() == after.keys() != set()
            assert all((before[name] == after[name]).all() for name in before)
    assert experts_per_token(model) is None and experts_per_token(make_value_model("mixtral")) == 2
    assert "bf16_values" in default_value_schemes()


def test_which_schemes_a_site_is_offered() -> None:
    sites = {site.part: site for site in find_value_sites(make_value_model("llama")) if site.layer == 0}
    names = {part: {c.scheme for c in value_candidates(site, list(VALUE_SCHEMES))} for part, site in sites.items()}
    assert "int4_channel_g32" in names["k_cache"] and "int4_channel_g32" not in names["v_cache"]
    assert names["softmax_sum"] == names["norm"] == names["residual"] == {"bf16_values", "fp16_values"}
    assert {"fp8_e4m3_unit", "bf16_values"} <= names["softmax"] and "fp8_e4m3_head" not in names["softmax"]
    assert {"fp8_e4m3_head", "int8_token"} <= names["qk"] & names["pv"]
    assert "fp8_e4m3_token" in names["act"] & names["down"] & names["up"]


def _values(number: str, scaling: Scaling | None, axis: Any, static: bool = False) -> ValueScheme:
    return ValueScheme(
        name="x",
        description="",
        source="",
        values=TensorScheme(format=number, scaling=scaling),
        axis=axis,
        static=static,
        roles=frozenset({"kv_cache"}),
    )


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (_values("bf16", None, "tensor"), 16.0),
        (_values("int8", Scaling(granularity=ROW, scale_format="fp32"), "token"), 8 + 32 / 64),
        (_values("uint4", Scaling(granularity=ROW, scale_format="fp16", symmetry="minimum"), "token"), 4 + 32 / 64),
        (_values("uint4", Scaling(granularity=group(32), scale_format="fp16", symmetry="minimum"), "token"), 5.0),
        (_values("uint4", Scaling(granularity=group(32), scale_format="fp16", symmetry="minimum"), "channel"), 5.0),
        (_values("fp8_e4m3", Scaling(granularity=TENSOR, scale_format="fp32"), "head", True), 8.0),
    ],
)
def test_stored_bits_of_a_head_of_64(scheme: ValueScheme, bits: float) -> None:
    assert scheme.stored_bits(64) == pytest.approx(bits, abs=1e-9)


def test_no_name_is_both_a_scheme_and_a_value_scheme() -> None:
    assert not set(SCHEMES) & set(VALUE_SCHEMES)


def test_a_sample_of_whole_groups_of_tokens() -> None:
    model = make_value_model("llama")
    (site,) = (s for s in find_value_sites(model) if s.name == "model.layers.0.self_attn:k_cache")
    observer = ValueObserver(model, [site], num_tokens=1024, seed=0, groups={site.name: 32})
    with observer:
        observer.batch(slice(0, 4), None)
        result = model(TEXT.input_ids[:4], use_cache=True)
        result.logits.log_softmax(-1)[..., 0].sum().backward()
    seen = observer.seen[site.name, "k"]
    values, _, weights = seen.rows()
    assert seen.num_seen == 256 and len(values) % 32 == 0
    groups = result.cache.layers[0].keys.detach().transpose(1, 2).reshape(8, 32, 2, 16)
    for tokens, tokens_weights in zip(values.split(32), weights.split(32), strict=True):
        assert any(torch.equal(tokens, group) for group in groups)
        assert len(set(tokens_weights.tolist())) == 1 and float(tokens_weights[0]) >= 1


def test_weighted_draws_estimate_a_sum_without_bias() -> None:
    # one token in a hundred does nearly all of the damage
    draw = torch.Generator().manual_seed(0)
    values, g = torch.randn(1000, 1, 8, generator=draw), torch.randn(1000, 1, 8, generator=draw)
    values[::100] *= 300
    exact = float((values * g).sum((1, 2)).square().sum())
    model = make_value_model("llama")
    estimates = []
    for seed in range(40):
        observer = ValueObserver(model, [], num_tokens=160_000, seed=seed)
        keep, weights = observer._draw(values, g, 1, 1)
        few = ValueObserver(model, [], num_tokens=1_600_000, seed=seed)
        assert len(few._draw(values, g, 1, 1)[0]) < len(keep) < 1000
        estimates.append(float((weights * (values * g)[keep].sum((1, 2)).square()).sum()))
    assert sum(estimates) / 40 == pytest.approx(exact, rel=0.15)
