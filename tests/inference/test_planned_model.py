"""A plan on other weights than its own: which tensors differ, named from what the test changed."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from small_plans import uniform_plan
from value_models import make_value_model

from bitwright.errors import PlanError
from bitwright.inference.planned_model import open_model
from bitwright.models import LoadedModel, find_sites, from_memory
from bitwright.models.loaded import hash_each_weight
from bitwright.plan import ModelInfo, Plan


def loaded_with(*changed: str) -> LoadedModel:
    """The same tiny model, with one number of some tensors moved by the least that fp32 can."""
    model = make_value_model("llama")
    with torch.no_grad():
        for name in changed:
            first = model.get_parameter(name).view(-1)[:1]
            first.copy_(torch.nextafter(first, first + 1))
    return from_memory(model, None, name="tiny")


def plan_for(loaded: LoadedModel, hashes: dict[str, str]) -> Plan:
    info = ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters)
    return uniform_plan(find_sites(loaded.model), "int8_w").replace(model=info, tensor_hashes=hashes)


def test_a_hash_is_of_one_tensor_alone() -> None:
    loaded = loaded_with()
    hashes = hash_each_weight(loaded.model)
    assert set(hashes) == {name for name, _ in loaded.model.named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    content = b"[96, 64]\n" + loaded.model.get_parameter(name).numpy().tobytes()
    assert hashes[name] == hashlib.sha256(content).hexdigest()[:16]
    other = hash_each_weight(loaded_with(name).model)
    assert {key for key in hashes if hashes[key] != other[key]} == {name}


def test_tensors_with_other_values_are_counted_and_named() -> None:
    plan = plan_for(loaded_with(), hash_each_weight(loaded_with().model))
    open_model(plan, loaded_with())
    two = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")
    told = rf"2 of 21 tensors have other values: {two[0]}; {two[1]}; give the right model"
    with pytest.raises(PlanError, match=told):
        open_model(plan, loaded_with(*two))
    layers = [f"model.layers.{n}.mlp.{part}_proj.weight" for n in (0, 1) for part in ("gate", "up", "down")]
    with pytest.raises(PlanError, match=r"6 of 21 tensors have other values: .*down_proj.weight; .*; and 1 more; give"):
        open_model(plan, loaded_with(*layers))


def test_tensors_that_the_plan_does_not_know_are_named() -> None:
    hashes = hash_each_weight(loaded_with().model)
    known = {name: value for name, value in hashes.items() if name != "lm_head.weight"}
    with pytest.raises(
        PlanError, match=r"1 of 20 tensors have other values: model.norm.weight; lm_head.weight is not in"
    ):
        open_model(plan_for(loaded_with(), known), loaded_with("model.norm.weight"))


def test_plans_of_older_schemas_tell_what_they_can() -> None:
    old: Any = plan_for(loaded_with(), {})
    with pytest.raises(PlanError, match="the shapes of all 14 tensors agree, their values do not"):
        open_model(old, loaded_with("model.norm.weight"))
