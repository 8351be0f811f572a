"""KL, likelihood and agreement against torch's own functions in float64; both ways of having reference logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text, text_set
from torch import nn
from torch.nn import functional as F

from bitwright.errors import ModelError
from bitwright.inference import SiteRule, emulate
from bitwright.models import find_sites
from bitwright.search.compare import Reference, compare, run_logits, run_reference

VOCABULARY = 50


def two_runs(scale: float, seed: int) -> tuple[Reference, torch.Tensor]:
    """A reference whose logits are given (an identity as head), and another run's logits."""
    generator = torch.Generator().manual_seed(seed)
    text = random_text(5, 12, seed, VOCABULARY)
    scored = torch.rand(5, 12, generator=generator) < 0.7
    scored[:, 0] = False
    text = text_set(text.input_ids, scored)
    logits = torch.randn(5, 12, VOCABULARY, generator=generator) * 4
    head = torch.eye(VOCABULARY)
    reference = Reference(text=text, head_inputs=logits, head_weight=head, head_bias=None)
    return reference, logits + scale * torch.randn(logits.shape, generator=generator)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
def test_equals_torch_in_float64(scale: float) -> None:
    reference, other = two_runs(scale, seed=1)
    text = reference.text
    found = compare(reference, lambda ids: other, NoStage())
    predicts = text.scored[:, 1:]
    p, q = reference.logits(slice(0, 5))[:, :-1].double(), other[:, :-1].double()
    targets = text.input_ids[:, 1:]
    for i in range(5):
        keep = predicts[i]
        log_p, log_q = p[i][keep].log_softmax(-1), q[i][keep].log_softmax(-1)
        kl = F.kl_div(log_q, log_p, log_target=True, reduction="sum")
        assert found.num_scored[i] == int(keep.sum())
        # fp32 logits of size 15: a log-probability carries about 1e-6
        assert found.kl[i] == pytest.approx(float(kl), rel=2e-5, abs=2e-6 * float(keep.sum()))
        nll = F.cross_entropy(p[i][keep], targets[i][keep], reduction="sum")
        assert found.nll_reference[i] == pytest.approx(float(nll), rel=1e-5)
        nll = F.cross_entropy(q[i][keep], targets[i][keep], reduction="sum")
        assert found.nll_plan[i] == pytest.approx(float(nll), rel=1e-5)
        assert found.num_agreeing[i] == int((p[i][keep].argmax(-1) == q[i][keep].argmax(-1)).sum())
    assert found.mean_kl == pytest.approx(found.kl.sum() / found.num_scored.sum())


def test_the_model_itself_has_a_kl_of_exactly_zero(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    text = random_text(70, 16)
    reference = run_reference(model, text, NoStage())
    found = compare(reference, lambda ids: run_logits(model, ids), NoStage())
    assert reference.head_inputs is not None
    assert np.all(found.kl == 0)
    assert np.array_equal(found.nll_plan, found.nll_reference)
    assert np.array_equal(found.num_agreeing, found.num_scored)


def test_a_large_vocabulary_comes_in_smaller_batches(
    make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the logits of 40 tokens: two sequences of 16; the numbers are those of 64 sequences at once."""
    model, other = make_tiny_model("llama"), make_tiny_model("llama", seed=1)
    text, sizes = random_text(7, 16), []

    def run(ids: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        return run_logits(other, ids)

    at_once = compare(run_reference(model, text, NoStage()), run, NoStage())
    monkeypatch.setattr("bitwright.search.compare.MAX_BATCH_LOGITS", 40 * model.config.vocab_size)
    found = compare(run_reference(model, text, NoStage()), run, NoStage())
    assert sizes == [7, 2, 2, 2, 1]
    np.testing.assert_allclose(found.kl, at_once.kl, rtol=1e-5)
    assert np.array_equal(found.num_scored, at_once.num_scored)


@pytest.mark.parametrize("num_sequences", [1, 16, 64, 70, 200])
def test_measures_exactly_the_sequences_asked_for(make_tiny_model: Callable[..., Any], num_sequences: int) -> None:
    model, other = make_tiny_model("llama"), make_tiny_model("llama", seed=1)
    text = random_text(70, 16)
    reference = run_reference(model, text, NoStage())
    stage = NoStage()
    found = compare(reference, lambda ids: run_logits(other, ids), stage, num_sequences)
    assert len(found.kl) == stage.steps == min(num_sequences, 70)
    whole = compare(reference, lambda ids: run_logits(other, ids), NoStage())
    assert found.kl == pytest.approx(whole.kl[:num_sequences], rel=1e-5)


def test_a_known_reference_is_not_run_again(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("qwen2")
    text = random_text(6, 16)
    first = run_reference(model, text, NoStage())
    assert first.head_inputs is not None
    stage = NoStage()
    calls = []
    with_hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    again = run_reference(model, text, stage, known_head_inputs=first.head_inputs)
    with_hook.remove()
    assert not calls and stage.steps == 6
    assert torch.equal(again.logits(slice(0, 6)), first.logits(slice(0, 6)))


@pytest.fixture
def softcapped() -> Any:
    """Logits that are more than the head's output: tanh(logits / cap) · cap (Gemma 2)."""
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=2.0,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=259,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def test_softcapped_logits_are_run_beside_the_plan(softcapped: Any) -> None:
    text = random_text(6, 16)
    stage = NoStage()
    reference = run_reference(softcapped, text, stage)
    assert reference.head_inputs is None and stage.steps == 6
    assert np.all(compare(reference, lambda ids: run_logits(softcapped, ids), NoStage()).kl == 0)
    sites = find_sites(softcapped)
    before = reference.logits(slice(0, 6))
    rules = {site.name: SiteRule(quantize_weight=torch.zeros_like) for site in sites}
    with emulate(softcapped, sites, rules):
        assert torch.equal(reference.logits(slice(0, 6)), before)
        assert compare(reference, lambda ids: run_logits(softcapped, ids), NoStage()).mean_kl > 0.01


def test_both_paths_agree(make_tiny_model: Callable[..., Any]) -> None:
    model, other = make_tiny_model("gemma"), make_tiny_model("gemma", seed=1)
    text = random_text(6, 16)
    cached = run_reference(model, text, NoStage())
    beside = dataclasses.replace(cached, head_inputs=None, model=model)
    found = [compare(r, lambda ids: run_logits(other, ids), NoStage()) for r in (cached, beside)]
    assert np.array_equal(found[0].kl, found[1].kl)


def test_the_reference_outlives_what_a_plan_does_to_a_tied_head(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("qwen2")
    sites = find_sites(model)
    reference = run_reference(model, random_text(4, 16), NoStage())
    before = reference.logits(slice(0, 4))
    with emulate(model, sites, {"lm_head": SiteRule(quantize_weight=torch.zeros_like)}):
        assert torch.equal(reference.logits(slice(0, 4)), before)


def test_logits_that_are_not_finite_are_errors(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    text = random_text(4, 16)
    reference = run_reference(model, text, NoStage())
    with pytest.raises(ModelError, match="plan's logits are not finite in sequences 0 to 3"):
        compare(reference, lambda ids: run_logits(model, ids) * torch.inf, NoStage())
    model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="reference's logits are not finite"):
        run_reference(model, text, NoStage())


def test_a_model_without_a_head_is_an_error() -> None:
    class Headless(nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(ModelError, match="no linear output head"):
        run_reference(Headless(), random_text(1, 4), NoStage())
