"""Routers and positions stay in fp32 whatever a model is made of; tables that were cast are computed anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.forward.named_islands import find_islands, install, repair_tables
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.policy import POLICIES

IDS = torch.arange(48).reshape(2, 24) % 256


def dtypes_seen(model: nn.Module, names: tuple[str, ...], run: Callable[[], Any]) -> dict[str, set[torch.dtype]]:
    """Dtypes of the floating outputs of some modules while something runs."""
    seen: dict[str, set[torch.dtype]] = {name: set() for name in names}
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            seen[name] |= {t.dtype for t in outputs if isinstance(t, Tensor) and t.is_floating_point()}

        return hook

    for name in names:
        hooks.append(model.get_submodule(name).register_forward_hook(watch(name)))
    run()
    for hook in hooks:
        hook.remove()
    return seen


def test_routers_and_rotary_embeddings_are_found(make_tiny_model: Callable[..., Any]) -> None:
    found = {island.module for island in find_islands(make_tiny_model("mixtral"))}
    assert found == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.rotary_emb"}
    assert {island.module for island in find_islands(make_tiny_model("gpt2"))} == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_decides_in_fp32(make_tiny_model: Callable[..., Any], dtype: torch.dtype) -> None:
    model = make_tiny_model("mixtral")
    names = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.rotary_emb")

    def run() -> None:
        with torch.autocast("cpu", dtype):
            model(IDS)

    assert dtypes_seen(model, names[:1], run)[names[0]] >= {dtype}
    islands = install(model)
    assert dtypes_seen(model, names, run) == {name: {torch.float32} for name in names}
    islands.remove()
    assert dtypes_seen(model, names[:1], run)[names[0]] >= {dtype}


def test_experts_are_chosen_as_in_fp32(make_tiny_model: Callable[..., Any]) -> None:
    """The router of an fp32 model and that of a bf16 run agree on equal inputs."""
    model = make_tiny_model("mixtral")
    router = model.model.layers[0].mlp.gate
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    plain = router(x.float())
    install(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    for a, b in zip(plain, found, strict=True):
        assert torch.equal(a, b)


def test_positions_are_fp32_in_a_bf16_model(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    cast_parameters(model, POLICIES["bf16-pure-sr"])
    install(model)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS)

    assert dtypes_seen(model, ("model.rotary_emb",), run) == {"model.rotary_emb": {torch.float32}}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "phi3", "mixtral"])
def test_tables_that_were_cast_are_computed_anew(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(torch.bfloat16)
    repaired = repair_tables(model)
    assert set(repaired) == set(before)
    for name, buffer in model.named_buffers():
        if name in before:
            assert torch.equal(buffer, before[name])
    assert repair_tables(model) == ()


class HomeMadeRotary(nn.Module):
    """A rotary embedding whose frequencies no config gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 16, 2) / 16), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = torch.einsum("t,f->tf", positions.to(x.dtype), self.inv_freq)
        return torch.cat([angles.cos(), angles.sin()], -1)


def test_a_table_that_nothing_can_compute_is_refused() -> None:
    model = nn.Sequential(HomeMadeRotary()).to(torch.bfloat16)
    with pytest.raises(TrainingError, match=r"0\.inv_freq is in bfloat16.*positions are wrong"):
        repair_tables(model)


def test_angles_that_would_be_wrong_by_radians_are_not() -> None:
    """einsum is on autocast's list: without the island the angle of position 4095 is off by more than a radian."""
    model = nn.Sequential(HomeMadeRotary())
    rotary, positions = model[0], torch.arange(4096.0)
    exact = rotary(torch.zeros(1), positions)
    x = torch.zeros(1, dtype=torch.bfloat16)

    def largest_error() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return float((rotary(x, positions).float() - exact).abs().max())

    assert largest_error() > 1
    install(model)
    assert largest_error() == 0


def test_a_copy_of_a_model_has_its_own_islands(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral")
    install(model)
    twin = copy.deepcopy(model)
    twin.model.layers[0].mlp.gate.weight.data.zero_()
    with torch.no_grad():
        assert not torch.equal(twin(IDS).logits, model(IDS).logits)
    assert twin.model.layers[0].mlp.gate.forward.__self__ is twin.model.layers[0].mlp.gate


def test_removing_leaves_nothing(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = set(model.state_dict())
    islands = install(model)
    assert set(model.state_dict()) == keys
    islands.remove()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_installing_twice_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    install(model)
    with pytest.raises(TrainingError, match=r"run\.close\(\)"):
        install(model)


def test_norms_and_routers_keep_fp32_parameters(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral").requires_grad_(True)
    said = cast_parameters(model, POLICIES["bf16-pure"])
    for name, parameter in model.named_parameters():
        is_island = "norm" in name or "mlp.gate." in name
        assert parameter.dtype == (torch.float32 if is_island else torch.bfloat16), name
    assert said is not None and "cast to bf16" in said
    assert cast_parameters(model, POLICIES["bf16-pure"]) is None
