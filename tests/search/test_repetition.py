"""Repeated 4-grams on sequences that one can count, and greedy decoding against running everything anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_search import ARCHITECTURES, NoStage, random_text

from bitwright.search.repetition import NEW_TOKENS, greedy, repeated_share, repetition


def test_the_share_of_repeated_grams() -> None:
    assert repeated_share(range(20), 4) == 0.0
    assert repeated_share([7] * 20, 4) == 1 - 1 / 17
    assert repeated_share([1, 2, 3, 4] * 5, 4) == 1 - 4 / 17
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4], 4) == pytest.approx(1 / 5)
    assert repeated_share([1, 2, 3], 4) == 0.0
    assert repeated_share([], 4) == 0.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_decoding_equals_running_the_whole_text_for_every_token(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model, prompts = make_tiny_model(architecture), random_text(3, 8).input_ids
    stage = NoStage()
    with torch.no_grad():
        found = greedy(model, prompts, 12, stage)
        ids = prompts
        for _ in range(12):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids[:, 8:])
    assert stage.steps == 12


def test_the_mean_over_the_prompts(make_tiny_model: Callable[..., Any]) -> None:
    """A head of zeros always says token 0: all but one of the 61 grams are repeated."""
    model = make_tiny_model("llama")
    model.lm_head.weight.zero_()
    stage = NoStage()
    assert repetition(model, random_text(10, 16), stage) == pytest.approx(1 - 1 / (NEW_TOKENS - 3))
    assert stage.steps == NEW_TOKENS
