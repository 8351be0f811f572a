"""Searches for an engine that has factors of columns in the norm before: what they choose can be exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import search_options
from torch import nn

from bitwright.export import export
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.models.norm_readers import find_factor_homes
from bitwright.plan import Budget, Plan
from bitwright.search.optimize import optimize

CHANGED = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")


def uneven(loaded: LoadedModel) -> LoadedModel:
    """Input columns that differ a hundredfold, so that factors gain."""
    for name, parameter in loaded.model.named_parameters():
        if "norm" in name:
            parameter.data[::9] *= 30
    return loaded


def searched(loaded: LoadedModel, prose: Path, engine: str, **changes: Any) -> Plan:
    return optimize(
        loaded,
        engine=engine,
        budget=Budget(effective_bits=9.0),
        **search_options(prose, include_head=False, **changes),
    )


@pytest.mark.parametrize(("engine", "to"), [("tensorrt-llm", "tensorrt-llm"), ("vllm", "compressed-tensors")])
def test_what_is_chosen_for_an_engine_is_exported(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path, engine: str, to: str
) -> None:
    loaded = uneven(load_tiny("llama"))
    plan = searched(loaded, prose, engine, schemes=("fp8", "bf16"), hardware="h100")
    smoothed = [site for site in plan.sites if site.transform == "smoothquant"]
    assert smoothed, "the columns are uneven enough for factors to gain"
    for layer in range(2):
        for roles in (CHANGED[:3], CHANGED[3:]):
            readers = [s for s in plan.sites if f"layers.{layer}." in s.name and s.role in roles]
            factors = [plan.tensors.get(f"{site.name}/column_scales") for site in readers]
            assert len({site.transform for site in readers}) == 1
            assert all(f is None for f in factors) or all(np.array_equal(f, factors[0]) for f in factors)  # type: ignore[arg-type]
    export(plan, loaded, to, tmp_path / "out")


def test_factors_of_weights_alone_are_one_set_too(
    load_tiny: Callable[..., LoadedModel], prose: Path, tmp_path: Path
) -> None:
    """llama.cpp joins no matrices, and yet q, k and v read one norm."""
    loaded = uneven(load_tiny("llama"))
    plan = searched(loaded, prose, "torchao", schemes=("int4_g32",), transforms=("none", "awq"), roundings=("rtn",))
    assert any(site.transform == "awq" for site in plan.sites)
    export(plan, loaded, "torchao", tmp_path / "out")


# --- where factors can go ---------------------------------------------------------------------------------------------


def test_readers_of_a_norm_share_it(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("llama").model
    sites = find_sites(model)
    homes = find_factor_homes(model, sites)
    layer = "model.layers.1"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert homes.norms[f"{layer}.{name}"] == f"{layer}.input_layernorm"
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        assert homes.norms[f"{layer}.{name}"] == f"{layer}.post_attention_layernorm"
    assert "comes from elsewhere" in homes.refused[f"{layer}.mlp.down_proj"]


def test_a_reader_without_a_choice_keeps_factors_out(load_tiny: Callable[..., LoadedModel]) -> None:
    """A matrix that stays as it is reads the norm as it is."""
    model = load_tiny("llama").model
    left = [site for site in find_sites(model) if not site.name.endswith("layers.0.self_attn.k_proj")]
    homes = find_factor_homes(model, left)
    for part in "qv":
        assert "self_attn.k_proj reads it too" in homes.refused[f"model.layers.0.self_attn.{part}_proj"]
    assert "model.layers.1.self_attn.q_proj" in homes.norms


def test_a_norm_that_adds_one_takes_none(load_tiny: Callable[..., LoadedModel]) -> None:
    """gemma multiplies by 1 + weight: its weight divided is not its output divided."""
    model = load_tiny("gemma").model
    homes = find_factor_homes(model, find_sites(model))
    assert not homes.norms
    assert "does more than to multiply" in homes.refused["model.layers.0.self_attn.q_proj"]


def test_a_norm_whose_output_goes_on_takes_none() -> None:
    """A norm after the sum, as in BERT: what it gives goes to the next sum as well, and that has no weights."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = transformers.BertModel(config).eval()
    homes = find_factor_homes(model, find_sites(model))
    assert "encoder.layer.1.attention.self.query" in homes.refused
    assert not homes.norms
