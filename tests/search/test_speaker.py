"""Text sampled from the model: its distribution, its seed, its cache, and plans that rest on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from text_inputs import byte_tokenizer
from tiny_search import BUDGET, NoStage, search_options

from bitwright.errors import DataError
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.pooling import Pooling
from bitwright.search.continuation import continuation
from bitwright.search.optimize import optimize
from bitwright.search.speaker import Speaker
from bitwright.search.text import Splits, split_text


def test_tokens_are_drawn_from_the_model_s_own_predictions(make_tiny_model: Callable[..., Any]) -> None:
    """4,000 draws after one prompt against the softmax of its logits: χ² of the sixteen likeliest and the rest."""
    model = make_tiny_model("llama")
    prompt = torch.tensor([[5, 77, 130]])
    generator = torch.Generator().manual_seed(0)
    drawn = continuation(
        model,
        prompt.expand(4000, -1),
        1,
        lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator),
        NoStage(),
    )
    p = model(input_ids=prompt).logits[0, -1].double().softmax(-1)
    likeliest = p.topk(16).indices
    counts = Counter(drawn.flatten().tolist())
    seen = torch.tensor([counts[int(i)] for i in likeliest], dtype=torch.float64)
    expected = 4000 * p[likeliest]
    rest = 4000 - seen.sum(), 4000 - expected.sum()
    chi_square = float(((seen - expected) ** 2 / expected).sum() + (rest[0] - rest[1]) ** 2 / rest[1])
    assert chi_square < 39.3  # 99.9 % of χ² with 16 degrees of freedom


def speak(loaded: LoadedModel, seed: int = 0, folder: Path | None = None, num_tokens: int = 600) -> list[str]:
    speaker = Speaker(loaded=loaded, sequence_length=32, seed=seed, folder=folder)
    return [document.text for document in speaker.documents(num_tokens)]


def test_the_seed_decides_and_documents_differ(load_tiny: Callable[..., LoadedModel]) -> None:
    loaded = load_tiny("llama")
    first = speak(loaded)
    assert first == speak(loaded) and first != speak(loaded, seed=1)
    assert len(set(first)) == len(first) >= 600 * 1.25 / 64


def test_the_token_before_every_text_comes_first(make_tiny_model: Callable[..., Any]) -> None:
    asked: list[torch.Tensor] = []
    model = make_tiny_model("llama")
    model.register_forward_pre_hook(lambda _, args, kwargs: asked.append(kwargs["input_ids"]), with_kwargs=True)
    speak(from_memory(model, byte_tokenizer(adds_bos=True), name="with BOS"))
    assert asked[0].tolist() == [[256]] * len(asked[0])
    asked.clear()
    speak(from_memory(model, byte_tokenizer(), name="without"))
    firsts = asked[0].flatten().tolist()
    assert len(set(firsts)) > len(firsts) / 2 and max(firsts) < 256  # no special token


def test_sampled_once(load_tiny: Callable[..., LoadedModel], tmp_path: Path) -> None:
    loaded = load_tiny("qwen2")
    first = speak(loaded, folder=tmp_path)
    calls: list[int] = []
    loaded.model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert speak(loaded, folder=tmp_path) == first and not calls
    speak(loaded, folder=tmp_path, seed=1)
    assert calls


@pytest.mark.parametrize(("calibration", "evaluation"), [("self", "docs"), ("self", "self"), ("docs", "self")])
def test_splits_of_sampled_text(load_tiny: Callable[..., LoadedModel], calibration: str, evaluation: str) -> None:
    loaded = load_tiny("llama")
    splits: Splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration=calibration,
        evaluation=evaluation,
        calibration_tokens=512,
        evaluation_tokens=1024,
        sequence_length=16,
        seed=0,
        speaker=Speaker(loaded=loaded, sequence_length=16, seed=0),
    )
    assert (splits.calibrate.source, splits.final.source) == (calibration, evaluation)
    assert splits.calibrate.num_sequences == 32 and splits.final.num_sequences == 64
    rows = [tuple(row.tolist()) for part in (splits.calibrate, splits.repair, splits.final) for row in part.input_ids]
    assert len(set(rows)) == len(rows)
    assert ("proves this plan was sampled" in splits.notes[0]) == (evaluation == "self")


def test_a_plan_says_that_its_text_was_sampled(load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    plan = optimize(load_tiny("llama"), budget=BUDGET, **search_options(prose, calibration="self"))
    assert plan.met and plan.calibration.source == "self" and plan.evaluation.source == "prose.txt"
    assert "calibrated on text that was sampled from the model itself" in plan.notes


def test_an_encoder_says_no_text(make_tiny_encoder: Callable[..., Any]) -> None:
    loaded = from_memory(make_tiny_encoder(), byte_tokenizer(), name="tiny-bert", pooling=Pooling(mode="mean"))
    with pytest.raises(DataError, match="an encoder, which predicts no tokens"):
        speak(loaded)


@pytest.mark.demo
@pytest.mark.slow
def test_the_built_in_model_says_something(demo_model: Any) -> None:
    """English words, in less than a minute of processor time for 4,096 tokens."""
    start = time.process_time()
    documents = Speaker(loaded=demo_model, sequence_length=128, seed=0).documents(4096)
    assert time.process_time() - start < 60 * torch.get_num_threads()
    text = " ".join(document.text for document in documents)
    assert len(demo_model.tokenizer(text).input_ids) > 4096
    words = Counter(text.lower().split())
    assert words["the"] > 50 and words["and"] > 20
