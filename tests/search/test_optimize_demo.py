"""The real model: its weights lie on a 4-bit grid, which one scheme reproduces exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_search import DEVICE, NoStage, text_set

from bitwright.models import find_sites, site_weight
from bitwright.plan import Budget
from bitwright.quantize import SCHEMES, dequantize, quantize
from bitwright.search import repetition
from bitwright.search.calibrate import calibrate
from bitwright.search.candidate import Candidate
from bitwright.search.compare import compare, run_logits, run_reference
from bitwright.search.optimize import optimize
from bitwright.search.price import END_ROLES
from bitwright.search.quantizer import Quantizer
from bitwright.search.score import score
from bitwright.search.text import split_text

pytestmark = [pytest.mark.demo, pytest.mark.slow]

EXACT = Candidate(scheme="int4_g32_min")


def test_the_grid_is_reproduced_bit_by_bit(demo_model: Any) -> None:
    weights = SCHEMES[EXACT.scheme].weights
    assert weights is not None
    for site in find_sites(demo_model.model):
        if site.role not in END_ROLES:
            weight = site_weight(demo_model.model, site).contiguous()
            assert torch.equal(dequantize(quantize(weight, weights)), weight), site.name


def test_predictions_agree_with_measurements(dithered_demo_model: Any) -> None:
    """Three sites in int4, 512 tokens to predict and to measure: within a factor of 3 (they span a decade)."""
    model = dithered_demo_model.model
    splits = split_text(
        dithered_demo_model.tokenizer,
        task="text",
        calibration="docs",
        evaluation="docs",
        calibration_tokens=512,
        evaluation_tokens=512,
        sequence_length=64,
        seed=0,
    )
    wanted = ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.v_proj", "model.layers.29.mlp.gate_proj")
    sites = [site for site in find_sites(model) if site.name in wanted]
    assert len(sites) == 3
    statistics = calibrate(model, sites, splits.calibrate, seed=0, stage=NoStage())
    candidate = Candidate(scheme="int4_g128")
    weights = SCHEMES[candidate.scheme].weights
    assert weights is not None
    text = text_set(splits.repair.input_ids[:8], splits.repair.scored[:8])
    reference = run_reference(model, text, NoStage())
    quantizer = Quantizer(shapes={site.name: site.shape for site in sites})
    for site, found in ((at.site, at.kl) for at in score(model, sites, statistics, quantizer, [candidate])):
        weight = site_weight(model, site)
        original = weight.clone()
        weight.copy_(dequantize(quantize(original.contiguous(), weights)))
        measured = compare(reference, lambda ids: run_logits(model, ids), NoStage()).mean_kl
        weight.copy_(original)
        assert 1 / 3 < found[candidate] / measured < 3, site.name


def test_a_search_finds_that_nothing_needs_to_be_lost(demo_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4_g32_min costs exactly nothing: predicted and measured."""
    monkeypatch.setattr(repetition, "NEW_TOKENS", 8)
    monkeypatch.setattr(repetition, "NUM_PROMPTS", 2)
    plan = optimize(
        demo_model,
        budget=Budget(effective_bits=5.0),
        hardware=DEVICE,
        tokens=128,
        evaluation_tokens=64 * 4,
        sequence_length=4,
        schemes=[EXACT.scheme],
        cache=None,
    )
    assert plan.met and plan.measured is not None
    assert plan.measured.kl.mean == plan.measured.kl.high == plan.summary.predicted_kl == 0
    assert plan.measured.top1_agreement.mean == 1 and plan.measured.ppl.ratio == 1
    decoder = [site for site in plan.sites if site.role not in END_ROLES]
    assert {(site.scheme, site.rounding, site.predicted_kl) for site in decoder} == {("int4_g32_min", "rtn", 0.0)}
    assert len(decoder) == 30 * 7
    assert plan.summary.effective_bits == 5.0
    assert any("4-bit grid of 32" in note for note in plan.model.notes)
