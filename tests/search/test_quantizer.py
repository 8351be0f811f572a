"""What was found runs from what a plan keeps of it, bit for bit, and is never found twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text
from torch import Tensor

from bitwright.models import find_sites, site_weight
from bitwright.models.linear_calls import matrices_of
from bitwright.models.sites import Site
from bitwright.quantize import ROUNDINGS, SCHEMES, fake_quantize
from bitwright.quantize.seen import Seen
from bitwright.search import quantizer as quantizer_module
from bitwright.search.cache import Cache
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.learn import MIN_TOKENS, count_tokens, learn
from bitwright.search.optimism import measure_optimism, optimism_of
from bitwright.search.progress import Silent
from bitwright.search.quantizer import Quantizer
from bitwright.search.recorder import Statistics
from bitwright.search.score import score

AWARE = Candidate(scheme="int4_g32", rounding="gradient_aware")


def matrix(rows: int = 12, columns: int = 96) -> tuple[Tensor, Seen]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, columns, generator=generator) * torch.rand(columns, generator=generator)
    g = torch.randn(300, rows, generator=generator)
    return torch.randn(rows, columns, generator=generator) * 0.02, Seen(x_TK=x, g_TN=g)


def decoder(model: Any) -> list[Site]:
    return [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g32_zp", "int4_g32_min", "nf4_g64", "nvfp4", "fp6_w", "mxfp4"])
@pytest.mark.parametrize("rounding", ["gptq", "gradient_aware"])
def test_codes_come_back_bit_for_bit(tmp_path: Path, scheme: str, rounding: str) -> None:
    """Out of memory, and out of the cache by another quantizer that sees no data."""
    w, seen = matrix()
    choice = Candidate(scheme=scheme, rounding=rounding)
    weights = SCHEMES[scheme].weights
    assert weights is not None
    expected = ROUNDINGS[rounding].quantize(w, weights, seen).dequantize()
    first = Quantizer(shapes={"x": (12, 96)}, cache=Cache(folder=tmp_path))
    first.find("x", choice, w, seen)
    assert torch.equal(first.values("x", choice, w), expected)
    first.write()
    second = Quantizer(shapes={"x": (12, 96)}, cache=Cache(folder=tmp_path))
    assert torch.equal(second.values("x", choice, w), expected)
    parts = {key.split("/")[1] for key in second.tensors("x", choice)}
    assert {"codes", "scales"} <= parts
    assert second.tensors("x", choice)["x/codes"].dtype == np.uint8


def test_nothing_is_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    w, seen = matrix()
    calls: list[str] = []
    original = quantizer_module.found_tensors

    def count(site_name: str, *args: Any) -> Any:
        calls.append(site_name)
        return original(site_name, *args)

    monkeypatch.setattr(quantizer_module, "found_tensors", count)
    quantizer = Quantizer(shapes={"x": (12, 96), "y": (12, 96)})
    for name in ("x", "y", "x", "y"):
        quantizer.find(name, AWARE, w, seen)
        quantizer.find(name, Candidate(scheme="int4_g32"), w, seen)  # codes that follow from the weights
    assert calls == ["x", "y"]
    assert quantizer.tensors("x", Candidate(scheme="int4_g32")) == {}


def test_a_choice_without_data_follows_from_the_weights() -> None:
    w, _ = matrix()
    quantizer = Quantizer(shapes={"x": (12, 96)})
    weights = SCHEMES["int4_g32"].weights
    assert weights is not None
    assert torch.equal(quantizer.values("x", Candidate(scheme="int4_g32"), w), fake_quantize(w, weights))


def test_a_fused_matrix_that_rounds_inputs_has_one_transform(make_tiny_model: Callable[..., Any]) -> None:
    """q, k and v of Phi-3 are rows of one matrix: what its input is divided by cannot differ between them."""
    model = make_tiny_model("phi3")
    for layer in model.model.layers:
        layer.input_layernorm.weight[::7] *= 30  # columns worth dividing
    sites = decoder(model)
    statistics = calibrate(model, sites, random_text(8, 16), seed=0, stage=NoStage())
    quantizer = Quantizer(shapes={site.name: site.shape for site in sites})
    choice = Candidate(scheme="int8", transform="smoothquant")
    scored = [at.site for at in score(model, sites, statistics, quantizer, [choice])]
    changed = 0
    for matrix in matrices_of(scored):
        rules = list(quantizer.rules(dict.fromkeys((site.name for site in matrix.sites), choice)).values())
        assert all(rule.rounds_inputs_like(rules[0]) for rule in rules)
        changed += len(rules) > 1 and not rules[0].transform.is_identity
    assert changed


# --- scores of codes that saw the text -------------------------------------------------------------------------------


def test_twice_the_tokens_take_optimism_by_the_root_of_two() -> None:
    """ρ of halves is e^1: of all tokens e^(1/√2); where the other half does no worse there is none."""
    assert math.log(optimism_of(math.e)) == pytest.approx(math.sqrt(0.5))
    assert optimism_of(0.8) == 1.0


def test_codes_that_saw_few_tokens_are_corrected_upwards(make_tiny_model: Callable[..., Any]) -> None:
    """On text of pure chance; rounding to nearest, which saw nothing, is not corrected at all."""
    model = make_tiny_model("llama")
    sites = decoder(model)
    candidates = candidates_of(["int4_g32"])
    assert AWARE in candidates
    found: dict[int, list[float]] = {}
    for num_sequences in (16, 128):
        statistics = calibrate(model, sites, random_text(num_sequences, 32), seed=0, stage=NoStage())
        optimism = measure_optimism(model, sites, statistics, candidates)
        assert {candidate for _, candidate in optimism} == {AWARE}
        found[num_sequences] = sorted(optimism.values())
    assert found[16][0] >= 1.0 and found[16][-1] > 1.1
    assert sum(found[16]) > sum(found[128])


# --- sites that few tokens reach --------------------------------------------------------------------------------------


def tokens_of(statistics: Statistics, name: str) -> int:
    return statistics.matrices[name].g_TN.shape[0] if name in statistics.matrices else 0


def test_an_expert_that_few_tokens_reach_is_named_and_kept(make_tiny_model: Callable[..., Any]) -> None:
    model, text = make_tiny_model("mixtral"), random_text(2, 32, seed=3)
    sites = decoder(model)
    learned = learn(
        model, sites, text, (Candidate(scheme="int4_g32"),), seed=0, cache=Cache(folder=None), progress=Silent()
    )
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    for matrix in matrices_of(sites):
        for site in matrix.sites:
            # the last token of a sequence moves nothing that is scored
            assert learned.reached[site.name] <= tokens_of(statistics, matrix.name)
            assert (site.name in learned.too_few) == (learned.reached[site.name] < MIN_TOKENS)
            assert (site.name in learned.scores) == (site.name not in learned.too_few)
    assert learned.too_few and learned.scores


def test_padding_reaches_nothing(make_tiny_model: Callable[..., Any]) -> None:
    model, text = make_tiny_model("llama"), random_text(4, 32)
    text.padding[:, 20:] = True
    text.scored[:, 20:] = False
    sites = decoder(model)
    statistics = calibrate(model, sites, text, seed=0, stage=NoStage())
    assert all(count <= 4 * 20 for count in count_tokens(sites, statistics).values())


def test_a_second_run_learns_the_same_from_the_cache(
    make_tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = make_tiny_model("llama"), random_text(8, 32)
    sites = decoder(model)
    options: dict[str, Any] = {"seed": 0, "cache": Cache(folder=tmp_path), "progress": Silent()}
    candidates = (Candidate(scheme="int4_g32"), AWARE, Candidate(scheme="int8_static"))
    first = learn(model, sites, text, candidates, **options)
    monkeypatch.setattr("bitwright.search.learn.calibrate", lambda *_, **__: pytest.fail("calibrated again"))
    second = learn(model, sites, text, candidates, **options)
    assert second.scores == first.scores and second.overflows == first.overflows and second.reached == first.reached
    for site in sites:
        weight = site_weight(model, site).contiguous()
        for candidate in candidates[:2]:
            values = [known.quantizer.values(site.name, candidate, weight) for known in (first, second)]
            assert torch.equal(*values)
    assert all(Candidate(scheme="int8_static") in counts for counts in first.overflows.values())
