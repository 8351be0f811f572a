"""What a short run shows, against the same figures by torch alone; and the model is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.planning.observe import observe
from bitwright.training.planning.observe_product import WatchedProduct
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, NVFP4

RECIPES = {"fp8": FP8_CURRENT, "block": FP8_BLOCK, "nvfp4": NVFP4}


def batches(seed: int = 0, count: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 250, (2, 32), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def linears(model: nn.Module) -> list[str]:
    return [name for name, entry in model.named_modules() if isinstance(entry, nn.Linear)]


def test_the_model_is_as_it_was(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.get_parameter("lm_head.weight").requires_grad_(True)
    observe(model, linears(model), batches(), RECIPES, learning_rate=1e-4)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["lm_head.weight"]
    assert not any(entry._forward_hooks for entry in model.modules())


def test_ranges_are_those_of_the_operands(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    name = "model.layers.1.mlp.down_proj"
    seen = observe(model, [name], batches(), RECIPES, learning_rate=1e-4)
    inputs, gradients, totals, losses = [], [], [], []

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0].detach())
        output.register_hook(lambda g: gradients.append(g.detach()))

    with pytest.MonkeyPatch.context():
        handle = model.get_submodule(name).register_forward_hook(hook)
        for batch in batches():
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
            totals += [p.grad.abs().max() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        handle.remove()
    (product,) = seen.products
    assert product.operands["x"].amax == max(x.abs().max() for x in inputs)
    assert product.operands["g"].amax == max(g.abs().max() for g in gradients)
    assert product.operands["x"].num == sum(x.numel() for x in inputs)
    assert seen.gradients.amax == max(totals)
    assert seen.loss == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_errors_are_those_of_rounded_operands() -> None:
    # a linear layer alone: y = x Wᵀ with the loss Σ y · c, so that g = c
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 32, bias=False)
    x, c = (torch.randn(48, size, generator=generator) for size in (64, 32))
    watched = WatchedProduct(name="layer", recipes={"fp8": FP8_CURRENT}, seed=0)
    y = layer(x)
    watched.see(layer, x, y)
    (y * c).sum().backward()

    def rounded(values: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
        scale = values.abs().max() / largest
        return (values / scale).to(dtype).float() * scale

    w = layer.weight.detach()
    x8, w8 = (rounded(values, torch.float8_e4m3fn, 448) for values in (x, w))
    c8 = rounded(c, torch.float8_e5m2, 57344)
    pairs = [(x8 @ w8.t(), x @ w.t()), (c8 @ w8, c @ w), (c8.t() @ x8, c.t() @ x)]
    # of 32, 64 and 64 columns the error that nine of ten stay within
    columns = [((a - b).norm(dim=0) / b.norm(dim=0)).sort().values for a, b in pairs]
    expected = [float(columns[0][28]), float(columns[1][57]), float(columns[2][57])]
    found = watched.sums["fp8"].error()
    assert [found.forward, found.dgrad, found.wgrad] == pytest.approx(expected, rel=1e-3)


def test_an_outlier_shows_in_the_error_of_one_scale(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    name = "model.layers.0.mlp.down_proj"
    plain = observe(model, [name], batches(), RECIPES, learning_rate=1e-4).products[0]
    with torch.no_grad():
        model.get_parameter(f"{name}.weight")[3, 5] = 300.0
    spoilt = observe(model, [name], batches(), RECIPES, learning_rate=1e-4).products[0]
    assert plain.errors["fp8"].forward < 0.05
    assert spoilt.errors["fp8"].dgrad > 5 * spoilt.errors["bf16"].dgrad
    assert plain.errors["bf16"].largest < plain.errors["fp8"].largest < plain.errors["nvfp4"].largest


def test_swallowed_updates_are_counted(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    small, large = (observe(model, [], batches(), {}, learning_rate=rate).updates.share for rate in (1e-6, 1.0))
    assert small > 0.9 and large < 0.05
    seen = observe(model, [], batches(), {}, learning_rate=1e-4)
    assert seen.second_moments.share > seen.first_moments.share  # 0.001 of a difference against 0.1
    assert seen.norms is not None and seen.norms.num == 5 * 2 * 64 * 64


def test_what_cannot_be_observed_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    with pytest.raises(TrainingError, match="1 batches"):
        observe(model, [], batches(count=1), {}, learning_rate=1e-4)
    with pytest.raises(TrainingError, match="observed in fp32"):
        observe(make_tiny_model("llama").bfloat16(), [], batches(), {}, learning_rate=1e-4)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = float("nan")
    with pytest.raises(TrainingError, match="loss of batch 0 is nan"):
        observe(model, [], batches(), {}, learning_rate=1e-4)
    assert not any(p.requires_grad for p in model.parameters())
