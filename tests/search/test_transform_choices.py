"""Transforms and static scales from candidates to scores to what runs, on tiny models of several architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_search import NoStage, random_text

from bitwright.inference import emulate
from bitwright.models import find_sites
from bitwright.search.cache import Cache
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.learn import learn

CANDIDATES = candidates_of(("int8", "int8_static", "int4_g32"), ("rtn",), ("none", "smoothquant", "awq", "hadamard"))


class NoProgress:
    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[NoStage]:
        yield NoStage()


def kl_of(reference: torch.Tensor, found: torch.Tensor) -> float:
    log_p, log_q = reference.log_softmax(-1), found.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2"])
def test_candidates_with_transforms_are_scored_and_run(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    """Input columns that differ a hundredfold: what smoothing and rotating save is predicted, and measured."""
    model = make_tiny_model(architecture)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data[::9] *= 30
    sites = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    text = random_text(8, 64)
    learned = learn(
        model,
        sites,
        text,
        CANDIDATES,
        seed=0,
        cache=Cache(folder=None),
        progress=NoProgress(),  # type: ignore[arg-type]
    )
    qkv = [site for site in sites if site.role in ("attn.q", "attn.k", "attn.v")]
    asked = {c.transform for c in learned.scores[qkv[0].name]}
    assert asked == {"none", "smoothquant", "awq", "hadamard"}
    reference = model(text.input_ids).logits
    measured, predicted = {}, {}
    for transform in ("none", "smoothquant", "hadamard"):
        choice = Candidate(scheme="int8_static", transform=transform)
        rules = learned.quantizer.rules({site.name: choice for site in qkv})
        assert all(rule.input_scale is not None for rule in rules.values())
        with emulate(model, find_sites(model), rules):
            measured[transform] = kl_of(reference, model(text.input_ids).logits)
        predicted[transform] = sum(learned.scores[site.name][choice] for site in qkv)
    for transform in ("smoothquant", "hadamard"):
        assert measured[transform] < 0.8 * measured["none"], (measured, predicted)
        assert predicted[transform] < 0.8 * predicted["none"], (measured, predicted)


def test_an_embedding_that_is_only_read_has_no_transform(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    ends = [site for site in find_sites(model) if site.role in ("embedding", "lm_head")]
    learned = learn(
        model,
        ends,
        random_text(4, 64),
        candidates_of(("int4_g32",), ("rtn",), ("none", "awq", "hadamard")),
        seed=0,
        cache=Cache(folder=None),
        progress=NoProgress(),  # type: ignore[arg-type]
    )
    asked = {site.role: {c.transform for c in learned.scores[site.name]} for site in ends}
    assert asked == {"embedding": {"none"}, "lm_head": {"none", "awq", "hadamard"}}
