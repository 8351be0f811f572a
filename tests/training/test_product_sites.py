"""Which linear layers multiply codes: the head, routers and the last layers do not, and what is no layer is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from bitwright.errors import ModelError
from bitwright.models.sites import find_sites
from bitwright.training.policy import POLICIES
from bitwright.training.prepare import prepare
from bitwright.training.products.sites import product_sites

FP8 = POLICIES["fp8-hybrid"]


@pytest.mark.parametrize(
    ("architecture", "num_low"), [("llama", 14), ("gpt2", 8), ("qwen2", 14), ("phi3", 8), ("mixtral", 8)]
)
def test_layers_of_models(make_tiny_model: Callable[..., Any], architecture: str, num_low: int) -> None:
    """Two layers each: q, k, v, o, gate, up, down; or fused ones; Mixtral's experts are no linear layers."""
    model = make_tiny_model(architecture)
    sites = product_sites(model, FP8)
    assert len(sites.low) == num_low and set(sites.high) == {"lm_head"}
    assert sites.high["lm_head"].startswith("lm_head: ")
    for name in (*sites.low, *sites.high):
        assert model.get_submodule(name).weight.dim() == 2


def test_experts_in_one_parameter_are_told(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral").requires_grad_(True)
    assert set(product_sites(model, FP8).beside) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    run = prepare(model, torch.optim.AdamW(model.parameters()), policy="fp8-hybrid")
    assert any("2 modules multiply in bf16 (expert: matrices of a MixtralExperts" in note for note in run.notes)
    run.close()


@pytest.mark.parametrize(
    ("share", "layers"), [(0.0, set()), (0.15, {8, 9}), (0.5, {5, 6, 7, 8, 9}), (1.0, set(range(10)))]
)
def test_the_last_layers(share: float, layers: set[int]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(8, 8)}) for _ in range(10))

    high = product_sites(Net(), replace(FP8, last_layers_high=share)).high
    assert {int(name.split(".")[1]) for name in high} == layers


class Router(nn.Module):
    """A router with a linear layer inside, as Switch Transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x)


def test_what_is_inside_a_router_is_the_routers() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"router": Router(), "fc1": nn.Linear(8, 8)})})
    sites = product_sites(model, FP8)
    assert set(sites.low) == {"mlp.fc1"}
    assert sites.high["mlp.router.classifier"].startswith("router: ")


def test_a_weight_that_is_computed_from_others_is_multiplied_as_it_comes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    weight_norm(model[0])
    assert set(product_sites(model, FP8).low) == {"0", "2"}
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy="fp8-hybrid")
    before = [p.detach().clone() for p in model.parameters()]
    with run.step() as step:
        step.backward(model(torch.ones(4, 8)).float().square().mean())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    run.close()
    with pytest.raises(ModelError, match=r"weight of '0'.*remove_parametrizations"):
        find_sites(model)


def test_a_plain_net_has_layers_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert set(product_sites(model, FP8).low) == {"0", "2"}
