"""A module that is not transformers' goes through the whole planner."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_models import IDS, VOCABULARY, Branching, Returning, TinyGPT, tiny_gpt
from tiny_search import NoStage, random_text, search_options, write_text
from torch import Tensor, nn

import bitwright
from bitwright.errors import ModelError
from bitwright.models import find_sites, plain_model
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget
from bitwright.search.compare import run_logits, run_reference
from bitwright.search.repetition import greedy


class Headless(nn.Module):
    """Logits by a product with the embedding, no layer of their own."""

    def __init__(self, gpt: TinyGPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        x = self.gpt.tok(ids)
        for block in self.gpt.blocks:
            x = block(x)
        return (torch.tanh(self.gpt.norm(x) @ self.gpt.tok.weight.T) * 4,)


def searched(loaded: LoadedModel, folder: Path, **changes: Any) -> Any:
    options = search_options(write_text(folder), **changes)
    return bitwright.optimize(loaded, budget=Budget(effective_bits=6.0), **options)


def test_a_hand_written_gpt_is_planned_under_its_own_names(tiny_tokenizer: Any, tmp_path: Path) -> None:
    gpt = tiny_gpt(layers=1)
    before = {name: parameter.clone() for name, parameter in gpt.named_parameters()}
    plan = searched(plain_model(gpt, tokenizer=tiny_tokenizer, name="own"), tmp_path, schemes=("int4_g32", "int8_w"))
    assert plan.measured is not None and plan.measured.kl.mean > 0
    assert {site.name for site in plan.sites if site.kind == "weight"} >= {"blocks.0.attn.wq", "blocks.0.fc2", "head"}
    assert len({site.scheme for site in plan.sites}) > 1
    assert plan.summary.effective_bits <= 6.0
    assert any(note.startswith("pos [128, 32] stays as it was loaded") for note in plan.model.notes)
    for name, parameter in gpt.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_module_without_a_head_is_compared_with_an_unchanged_copy(tiny_tokenizer: Any, tmp_path: Path) -> None:
    loaded = plain_model(Headless(tiny_gpt()).eval(), tokenizer=tiny_tokenizer)
    text = random_text(3, 12)
    reference = run_reference(loaded.model, text, NoStage())
    assert reference.head_inputs is None and reference.model is not loaded.model
    expected = run_logits(loaded.model, text.input_ids[:2])
    loaded.model.get_parameter("gpt.blocks.0.fc1.weight").data.zero_()
    assert torch.equal(reference.logits(slice(0, 2)), expected)
    assert not torch.equal(run_logits(loaded.model, text.input_ids[:2]), expected)


def test_names_logits_and_generation_are_those_of_the_module(tiny_tokenizer: Any) -> None:
    gpt = tiny_gpt()
    model: Any = plain_model(gpt, tokenizer=tiny_tokenizer).model
    assert list(dict(model.named_parameters())) == list(dict(gpt.named_parameters()))
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, gpt(IDS))
    assert model.get_output_embeddings() is gpt.head and model.get_input_embeddings() is gpt.tok
    ids = IDS
    for _ in range(3):
        ids = torch.cat([ids, gpt(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy(model, IDS, 3, NoStage()), ids[:, IDS.shape[1] :])
    assert [site.name for site in find_sites(model)][-1] == "head"


def test_a_copy_shares_nothing_and_still_runs() -> None:
    model: Any = plain_model(tiny_gpt()).model
    half = copy.deepcopy(model)
    half.get_parameter("blocks.0.fc1.weight").data.zero_()
    assert half.wrapped is not model.wrapped
    assert not torch.equal(half(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert half.to(torch.bfloat16)(input_ids=IDS).logits.dtype == torch.bfloat16
    assert half.train().wrapped.blocks[0].training and not model.wrapped.training


@pytest.mark.parametrize("wrapping", ["tuple", "dict", "object"])
def test_logits_are_found_in_what_a_module_returns(wrapping: str) -> None:
    module = Returning(tiny_gpt(), wrapping)
    assert torch.equal(run_logits(plain_model(module).model, IDS), module.gpt(IDS))


def test_what_cannot_be_wrapped_says_what_to_do(tmp_path: Path) -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.branch = nn.Embedding(VOCABULARY, 8), Branching()

        def forward(self, ids: Tensor) -> Tensor:
            return self.branch(self.table(ids))

    with pytest.raises(ModelError, match=r"cannot be traced by torch.export .*--sites"):
        plain_model(Ids())
    file = tmp_path / "sites.toml"
    file.write_text('[[site]]\nmodule = "branch.*"\nrole = "mlp.up"\n', encoding="utf-8")
    assert [site.name for site in plain_model(Ids(), site_file=file).model.weight_sites()] == [
        "branch.first",
        "branch.second",
    ]
    with pytest.raises(ModelError, match=r"returns a \w+ without logits"):
        plain_model(Unhelpful())
    with pytest.raises(ModelError, match=r"logits of shape \[2, 260\]"):
        plain_model(tiny_gpt(), logits=lambda model, ids: model(ids)[:, -1])


class Unhelpful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, ids: Tensor) -> Any:
        return {"hidden": self.table(ids)}
