"""Sentence encoders: vectors against transformers alone; KL, ranks and Fisher information against closed forms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_inputs import byte_tokenizer
from tiny_search import NoStage, search_options, text_set
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from bitwright.errors import BudgetError, DataError, ModelError
from bitwright.models import find_sites, site_weight
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.pooling import Pooling
from bitwright.plan import Budget, load_plan, parse_plan, write_plan
from bitwright.search.calibrate import calibrate
from bitwright.search.optimize import optimize, verify
from bitwright.search.output import open_output
from bitwright.search.outputs.embedding import Embedding, EmbeddingEffects
from bitwright.search.text import Splits, TextSet, split_text

PAD = 259


def encoder_tokenizer() -> Any:
    """Bytes between <s> and <unk>, as BERT puts [CLS] and [SEP] around a text."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <unk>", special_tokens=[("<s>", 256), ("<unk>", 257)]
    )
    return tokenizer


@pytest.fixture
def encoder(make_tiny_encoder: Callable[..., Any]) -> LoadedModel:
    return from_memory(make_tiny_encoder(), encoder_tokenizer(), name="tiny-bert", pooling=Pooling(mode="mean"))


def texts_of_lengths(lengths: list[int], width: int, seed: int = 0) -> TextSet:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), width), PAD)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(0, 256, (length,), generator=generator)
    return text_set(ids, ids != PAD, ids == PAD)


def alone(model: Any, text: TextSet, mode: str) -> Tensor:
    """Unit vectors of each text run by itself without padding, pooled in plain words."""
    pools: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda h: h.sum(0) / len(h),
        "cls": lambda h: h[0],
        "last": lambda h: h[-1],
        "max": lambda h: h.max(0).values,
    }
    found = []
    for ids, scored in zip(text.input_ids, text.scored, strict=True):
        vector = pools[mode](model(input_ids=ids[scored][None]).last_hidden_state[0])
        found.append(vector / vector.square().sum().sqrt())
    return torch.stack(found)


@pytest.mark.parametrize("mode", ["mean", "cls", "last", "max"])
def test_padding_changes_no_vector(encoder: LoadedModel, mode: Any) -> None:
    text = texts_of_lengths([3, 20, 1, 11, 20], width=20)
    output = Embedding(pooling=Pooling(mode=mode))
    reference = output.run_reference(encoder.model, text, NoStage())
    assert torch.allclose(reference.kept, alone(encoder.model, text, mode), atol=2e-6)


def test_kl_is_one_minus_cosine_and_zero_for_the_model_itself(
    encoder: LoadedModel, make_tiny_encoder: Callable[..., Any]
) -> None:
    text = texts_of_lengths([5, 30, 12, 7] * 20, width=32)
    output = open_output("embedding", encoder)
    stage = NoStage()
    reference = output.run_reference(encoder.model, text, stage)
    assert stage.steps == 80
    assert output.compare(reference, encoder.model, NoStage()).mean_kl == 0
    other = make_tiny_encoder(seed=1)
    found = output.compare(reference, other, NoStage(), num_sequences=33)
    cosines = torch.nn.functional.cosine_similarity(
        alone(encoder.model, text, "mean").double(), alone(other, text, "mean").double()
    )
    assert len(found.kl) == 33
    assert found.kl == pytest.approx(1 - cosines[:33].numpy(), rel=1e-4)
    again = output.run_reference(other, text, NoStage(), known=reference.kept)
    assert again.kept is reference.kept  # and the other model was not run


def test_neighbours_against_counting_by_hand() -> None:
    """Random vectors; ranks, overlaps and τ in plain loops."""
    generator = np.random.default_rng(0)
    e = generator.normal(size=(14, 5))
    moved = e + 0.3 * generator.normal(size=e.shape)
    e, moved = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (e, moved))
    found = Embedding(pooling=Pooling(mode="mean")).figures(EmbeddingEffects(reference_SD=e, plan_SD=moved), seed=0)
    figures = found["embedding"]

    def ranked(vectors: np.ndarray, i: int) -> list[int]:
        return sorted((j for j in range(14) if j != i), key=lambda j: -float(vectors[i] @ vectors[j]))

    for neighbours in figures.neighbours:
        k = neighbours.k
        shares = [len(set(ranked(e, i)[:k]) & set(ranked(moved, i)[:k])) / k for i in range(14)]
        assert neighbours.overlap.mean == pytest.approx(np.mean(shares))
        assert neighbours.overlap.low <= neighbours.overlap.mean <= neighbours.overlap.high
    taus = []
    for i in range(14):
        places = [ranked(moved, i).index(j) for j in ranked(e, i)[:10]]
        taus.append(np.mean([1.0 if a < b else -1.0 for a, b in itertools.combinations(places, 2)]))
    assert figures.rank_correlation.mean == pytest.approx(np.mean(taus))
    cosines = (e * moved).sum(-1)
    assert figures.cosine.mean == pytest.approx(cosines.mean(), rel=1e-6)
    assert figures.cosine_low.mean == pytest.approx(np.quantile(cosines, 0.05), rel=1e-6)
    assert [n.k for n in figures.neighbours] == [1, 10] and figures.corpus == 14


def test_few_texts_have_no_ten_neighbours() -> None:
    e = np.eye(4)
    figures = Embedding(pooling=Pooling(mode="mean")).figures(EmbeddingEffects(reference_SD=e, plan_SD=e), seed=0)
    assert [n.k for n in figures["embedding"].neighbours] == [1] and figures["embedding"].rank_correlation is None


def test_calibration_gives_the_fisher_information(encoder: LoadedModel) -> None:
    """E[(gᵀ E x)²] = ‖J E x‖², J the Jacobian of the vector: many draws against a finite difference."""
    text = texts_of_lengths([9], width=12)
    output = open_output("embedding", encoder)
    site = next(s for s in find_sites(encoder.model) if s.role == "mlp.down")
    error = 1e-3 * torch.randn(site.shape, generator=torch.Generator().manual_seed(3))
    before = alone(encoder.model, text, "mean").double()
    weight = site_weight(encoder.model, site)
    weight.add_(error)
    moved = alone(encoder.model, text, "mean").double() - before
    weight.sub_(error)
    repeated = TextSet(
        source="by hand",
        description="one text many times",
        input_ids=text.input_ids.repeat(600, 1),
        scored=text.scored.repeat(600, 1),
        padding=text.padding.repeat(600, 1),
        hash="",
    )
    found = calibrate(encoder.model, [site], repeated, seed=0, stage=NoStage(), output=output)
    statistics = found.matrices[site.parameter]
    x, g = statistics.inputs.x_TK.float(), statistics.g_TN.float()
    shifts = ((x @ error.T) * g).sum(-1).reshape(600, 12).sum(-1).double()
    assert found.num_scored == 600
    assert found.window_tokens == 12  # errors are summed over whole texts
    assert float(shifts.square().mean()) == pytest.approx(float(moved.square().sum()), rel=0.2)
    assert float(g.reshape(600, 12, -1)[:, 9:].abs().max()) == 0  # padding moves nothing


# --- text ------------------------------------------------------------------------------------------------------------


def split_embedding(path: Path, **changes: Any) -> Splits:
    options: dict[str, Any] = {
        "task": "embedding",
        "calibration": path,
        "evaluation": path,
        "calibration_tokens": 500,
        "evaluation_tokens": 5000,
        "sequence_length": 64,
        "seed": 0,
    }
    return split_text(encoder_tokenizer(), **(options | changes))


def write_rows(folder: Path, texts: list[str]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


def test_a_text_is_a_sequence_with_its_special_tokens(tmp_path: Path) -> None:
    long = "a sentence that is rather longer than the sixty-two letters that fit into one sequence"
    texts = [f"number {i} and some words" + (long if i % 3 == 0 else "") for i in range(400)]
    splits = split_embedding(write_rows(tmp_path, texts))
    seen: set[tuple[int, ...]] = set()
    for part, tokens in ((splits.calibrate, 500), (splits.repair, 5000), (splits.final, 5000)):
        assert torch.equal(part.scored, ~part.padding)
        assert tokens <= part.num_tokens < tokens + 64
        for ids, scored in zip(part.input_ids, part.scored, strict=True):
            real = ids[scored].tolist()
            assert real[0] == 256 and real[-1] == 257 and len(real) <= 64
            assert tuple(real) not in seen
            seen.add(tuple(real))
    assert splits.final.num_sequences >= 64


def test_paragraphs_are_texts_and_headings_are_not(tmp_path: Path) -> None:
    heading, body = "Heading 1\n\n", "a paragraph of more than thirty letters, with a number {} in it"
    texts = [heading + "\n\n".join(body.format(f"{i}-{j}") for j in range(3)) for i in range(120)]
    splits = split_embedding(write_rows(tmp_path, texts), sequence_length=128)
    tokenizer = encoder_tokenizer()
    words = [
        tokenizer.decode(ids[mask][1:-1]) for ids, mask in zip(splits.final.input_ids, splits.final.scored, strict=True)
    ]
    assert {text.startswith("Heading 1\n\na paragraph") for text in words} == {True, False}
    assert all(text.count("a paragraph") == 1 for text in words)


@pytest.mark.parametrize(
    ("texts", "changes", "sentence"),
    [
        (["", "  ", "\n\n"], {}, "holds no text"),
        ([f"short text number {i}" for i in range(30)], {}, "too short.*different texts of"),
        ([f"short text number {i}" for i in range(30)], {"sequence_length": 2}, "--sequence-length is 2.* least 3"),
    ],
)
def test_bad_text(tmp_path: Path, texts: list[str], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        split_embedding(write_rows(tmp_path, texts), **changes)


# --- the whole job ---------------------------------------------------------------------------------------------------


def test_a_plan_for_an_encoder(encoder: LoadedModel, prose: Path, tmp_path: Path) -> None:
    options = search_options(prose, task="embedding", sequence_length=48, tokens=400, evaluation_tokens=2000)
    plan = optimize(encoder, budget=Budget(max_kl=0.005), **options)
    assert plan.met and plan.measured is not None
    measured = plan.measured
    assert 0 < measured.kl.mean <= 0.005 and measured.unit == "text"
    assert measured.ppl is measured.top1_agreement is measured.repetition is measured.kl_p999 is None
    assert measured.embedding is not None
    assert measured.embedding.cosine.mean == pytest.approx(1 - measured.kl.mean)
    assert measured.embedding.corpus == measured.sequences >= 64
    assert 0 < measured.bf16_floor_kl < measured.kl.mean
    assert {site.role for site in plan.sites if site.scheme != "as_loaded"} == {
        "attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"
    }  # fmt: skip
    total = plan.predictions[-1]
    assert 0.4 < total.predicted_kl / total.measured_kl < 2.5
    assert parse_plan(plan.to_json()) == plan
    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert verify(read, model=encoder) == measured


def test_what_does_not_go_together(encoder: LoadedModel, load_tiny: Callable[..., LoadedModel], prose: Path) -> None:
    with pytest.raises(ModelError, match=r"no linear output head.*--task embedding"):
        optimize(encoder, **search_options(prose))
    with pytest.raises(ModelError, match=r"predicts tokens.*--task text"):
        optimize(load_tiny("llama"), **search_options(prose, task="embedding"))
    with pytest.raises(BudgetError, match=r"max_ppl_increase.*predicts no tokens"):
        optimize(encoder, budget=Budget(max_ppl_increase=0.1), **search_options(prose, task="embedding"))
    with pytest.raises(DataError, match="longer than the 128 positions"):
        optimize(encoder, **search_options(prose, task="embedding", sequence_length=129))


def test_vectors_that_are_not_finite_name_their_sequences(encoder: LoadedModel) -> None:
    text = texts_of_lengths([5, 6, 7], width=8)
    output = open_output("embedding", encoder)
    reference = output.run_reference(encoder.model, text, NoStage())
    encoder.model.encoder.layer[1].output.dense.bias[0] = torch.inf  # type: ignore[union-attr, index]
    with pytest.raises(ModelError, match="plan's vectors are not finite in sequences 0 to 2"):
        output.compare(reference, encoder.model, NoStage())
    with pytest.raises(ModelError, match="reference's vectors are not finite in sequences 0 to 2"):
        output.run_reference(encoder.model, text, NoStage())


@pytest.mark.demo
@pytest.mark.slow
def test_a_plan_for_the_built_in_encoder(demo_encoder: LoadedModel) -> None:
    """A smaller encoder whose vectors stay, and whose prediction holds."""
    plan = optimize(
        demo_encoder,
        budget=Budget(max_kl=0.005),
        task="embedding",
        schemes=("int4_g32", "int4_g64", "int8_w", "bf16"),
        hardware="x86-avx512-bf16",
        cache=None,
    )
    assert plan.met and plan.measured is not None and plan.measured.embedding is not None
    assert plan.summary.effective_bits < 8
    assert 0.7 < plan.summary.predicted_kl / plan.measured.kl.mean < 1.4
    figures = plan.measured.embedding
    assert figures.cosine.mean > 0.995
    assert all(neighbours.overlap.mean > 0.85 for neighbours in figures.neighbours)
    assert plan.measured.bf16_floor_kl < 1e-3
