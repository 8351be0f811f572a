"""Linear layers under every recipe: values, gradients, shapes, states, wrappers; against sums in fp64 by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwright.errors import TrainingError
from bitwright.quantize import Scaling, TensorScheme, fake_quantize
from bitwright.quantize.granularity import ROW
from bitwright.training.product_recipe import Delay, OperandRule, ProductRecipe
from bitwright.training.products.low_precision_linear import InstalledProducts, choose_products, install
from bitwright.training.recipes import FP8_BLOCK, FP8_CURRENT, FP8_DELAYED, MXFP8, NVFP4, fp8_hybrid

_ROWS = OperandRule(scheme=TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=ROW, scale_format="fp32")))
RECIPES = {
    "delayed": FP8_DELAYED,
    "current": FP8_CURRENT,
    "block": FP8_BLOCK,
    "mx": MXFP8,
    "nvfp4": NVFP4,
    "rows": ProductRecipe(forward_x=_ROWS, forward_w=_ROWS, dgrad_g=_ROWS),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(in_features: int, out_features: int, *, bias: bool = True, seed: int = 1) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(gaussian(out_features, in_features, seed=seed) * 0.05)
        if bias:
            linear.bias.copy_(gaussian(out_features, seed=seed + 1))
    return linear


def installed_in(linear: nn.Module, recipe: ProductRecipe, **more: Any) -> InstalledProducts:
    return install(nn.ModuleDict({"linear": linear}), recipe, {"linear": "other"}, **more)


def run(linear: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """y, and the gradient of x; gradients of parameters are left in them."""
    x = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(g)
    assert x.grad is not None
    return y.detach(), x.grad


# --- values -----------------------------------------------------------------------------------------------------------


def test_current_scaling_by_hand() -> None:
    """All three products with codes of ml_dtypes and sums in fp64."""
    x, g, linear = gaussian(24, 40), gaussian(24, 56, seed=5) * 1e-6, layer(40, 56)

    def codes(values: Tensor, dtype: type, largest: float) -> np.ndarray:
        scale = (values.abs().max() / largest).numpy()
        return (values.numpy() / scale).astype(dtype).astype(np.float64) * np.float64(scale)

    weight = codes(linear.weight.detach(), ml_dtypes.float8_e4m3fn, 448.0)
    x_hat, g_hat = codes(x, ml_dtypes.float8_e4m3fn, 448.0), codes(g, ml_dtypes.float8_e5m2, 57344.0)
    installed_in(linear, FP8_CURRENT)
    y, dx = run(linear, x, g)
    assert linear.weight.grad is not None and linear.bias.grad is not None
    assert np.allclose(y.numpy(), x_hat @ weight.T + linear.bias.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert np.allclose(dx.numpy(), g_hat @ weight, rtol=1e-5, atol=1e-13)
    assert np.allclose(linear.weight.grad.numpy(), g_hat.T @ x_hat, rtol=1e-5, atol=1e-12)
    assert np.allclose(linear.bias.grad.numpy(), g.double().sum(0).numpy(), rtol=1e-5, atol=1e-12)


@EVERY_RECIPE
@pytest.mark.parametrize("shape", [(96, 192, 64), (37, 576, 49), (1, 100, 130), (130, 33, 1), (16, 16, 16)])
def test_operands_are_rounded_along_what_is_summed(recipe: ProductRecipe, shape: tuple[int, int, int]) -> None:
    """Every product is that of `fake_quantize` of its two operands, seen as its rows by what it sums over."""
    if recipe is FP8_DELAYED:
        recipe = FP8_CURRENT  # the first step of delayed scaling: its codes are tested elsewhere
    tokens, columns, rows = shape
    x, g, linear = gaussian(tokens, columns), gaussian(tokens, rows, seed=3), layer(columns, rows)
    rules = recipe.operands
    installed = installed_in(linear, recipe)
    seeds = {name: installed._operands._seed(installed._layers["linear"], name) for name in rules}
    y, dx = run(linear, x, g)

    def seen(matrix: Tensor, name: str) -> Tensor:
        rule = rules[name]
        if rule.rotation:
            from bitwright.training.products.rotation import rotate

            matrix = rotate(matrix, rule.rotation).contiguous()
        seed = seeds[name] if rule.is_stochastic else None
        return fake_quantize(matrix.contiguous(), rule.scheme, rounding=rule.rounding, seed=seed).double()

    weight = linear.weight.detach()
    assert linear.weight.grad is not None
    expected = {
        "y": seen(x, "forward_x") @ seen(weight, "forward_w").t() + linear.bias.detach().double(),
        "dx": seen(g, "dgrad_g") @ seen(weight.t(), "dgrad_w").t(),
        "dw": seen(g.t(), "wgrad_g") @ seen(x.t(), "wgrad_x").t(),
    }
    for name, found in (("y", y), ("dx", dx), ("dw", linear.weight.grad)):
        assert torch.allclose(found.double(), expected[name], rtol=1e-5, atol=2e-5), name


@EVERY_RECIPE
def test_it_is_near_what_it_stands_for(recipe: ProductRecipe) -> None:
    x, g, linear = gaussian(64, 128), gaussian(64, 96, seed=3), layer(128, 96)
    exact_y, exact_dx = run(linear, x, g)
    assert linear.weight.grad is not None
    exact_dw = linear.weight.grad.clone()
    installed_in(linear, recipe)
    y, dx = run(linear, x, g)
    limit = 0.35 if recipe is NVFP4 else 0.08
    for found, exact in ((y, exact_y), (dx, exact_dx), (linear.weight.grad, exact_dw)):
        assert 0 < float((found - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize("recipe", [FP8_CURRENT, MXFP8], ids=["current", "mx"])
def test_dtypes(recipe: ProductRecipe) -> None:
    """Output in the compute dtype, gradients of parameters in theirs, gradient of x in its own."""
    x, linear = gaussian(8, 32), layer(32, 48)
    installed_in(linear, recipe)
    for is_autocast, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
        given = x.clone().to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            y = linear(given)
        assert y.dtype == (torch.bfloat16 if is_autocast else torch.float32)
        y.sum().backward()
        assert given.grad is not None and given.grad.dtype == dtype
        assert linear.weight.grad is not None and linear.weight.grad.dtype == torch.float32
    narrow = layer(32, 48).bfloat16()
    installed_in(narrow, recipe)
    run(narrow, x.bfloat16(), gaussian(8, 48).bfloat16())
    assert narrow.weight.grad is not None and narrow.weight.grad.dtype == torch.bfloat16


def test_gradients_of_fp32_weights_are_not_rounded_to_bf16() -> None:
    x, linear = gaussian(64, 32), layer(32, 48)
    installed_in(linear, FP8_CURRENT)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x).backward(gaussian(64, 48, seed=2).bfloat16())
    assert linear.weight.grad is not None
    grad = linear.weight.grad
    assert float((grad != grad.bfloat16().float()).float().mean()) > 0.9


# --- shapes and kinds of layers ---------------------------------------------------------------------------------------


@EVERY_RECIPE
@pytest.mark.parametrize("make", [
    lambda: gaussian(0, 40),
    lambda: gaussian(2, 3, 40),
    lambda: gaussian(2, 0, 40),
    lambda: gaussian(40),
    lambda: gaussian(40, 6).t(),
    lambda: gaussian(6, 80)[:, ::2],
    lambda: gaussian(1, 1, 40).expand(4, 5, 40),
], ids=["no tokens", "3-D", "3-D without tokens", "1-D", "transposed", "every other", "expanded"])  # fmt: skip
def test_shapes(recipe: ProductRecipe, make: Callable[[], Tensor]) -> None:
    x, linear = make(), layer(40, 24)
    plain = layer(40, 24)
    installed_in(linear, recipe)
    g = gaussian(*x.shape[:-1], 24, seed=4)
    (y, dx), (exact_y, exact_dx) = run(linear, x, g), run(plain, x, g)
    assert y.shape == exact_y.shape and dx.shape == exact_dx.shape
    assert linear.weight.grad is not None and plain.weight.grad is not None
    assert linear.weight.grad.shape == plain.weight.grad.shape
    if x.numel() == 0:
        assert torch.equal(linear.weight.grad, torch.zeros(24, 40))
    else:
        assert float((y - exact_y).norm() / exact_y.norm()) < 0.35


@EVERY_RECIPE
def test_conv1d_is_the_linear_layer_that_it_is(recipe: ProductRecipe) -> None:
    from transformers.pytorch_utils import Conv1D

    linear, conv = layer(48, 80), Conv1D(80, 48)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    installed_in(linear, recipe)
    installed_in(conv, recipe)
    x, g = gaussian(3, 7, 48), gaussian(3, 7, 80, seed=3)
    (y, dx), (conv_y, conv_dx) = run(linear, x, g), run(conv, x, g)
    assert torch.allclose(y, conv_y, atol=1e-5) and torch.allclose(dx, conv_dx, atol=1e-5)
    assert linear.weight.grad is not None
    assert torch.allclose(conv.weight.grad, linear.weight.grad.t(), atol=1e-4)


@pytest.mark.parametrize("recipe", [FP8_DELAYED, NVFP4], ids=["delayed", "nvfp4"])
def test_frozen_parts_get_no_gradient_and_cost_no_product(recipe: ProductRecipe) -> None:
    linear = layer(32, 48)
    installed = installed_in(linear, recipe, counts_lost=True)
    linear.weight.requires_grad_(False)
    x = gaussian(8, 32).requires_grad_()
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad is not None
    assert ("linear", "wgrad_x") not in installed.counters()
    linear.weight.requires_grad_(True)
    linear(gaussian(8, 32)).sum().backward()
    assert linear.weight.grad is not None


# --- states -----------------------------------------------------------------------------------------------------------


def test_delayed_scales_follow_the_formula_of_transformer_engine() -> None:
    """inv_scale = (448 / max of the last amaxes) / 2^margin, found once a step; the first step has its own amax."""
    linear = layer(16, 8, bias=False)
    installed = installed_in(linear, fp8_hybrid(Delay(history=3, margin=1)))
    seen: list[float] = []
    for step in range(8):
        amaxes = []
        for micro in range(2):  # micro-batches: the largest of them counts
            x = gaussian(4, 16, seed=10 * step + micro) * (step - 3.5)
            amaxes.append(float(x.abs().max()))
            linear(x).sum().backward()
        scale = installed._operands.delayed.inv_scale("linear.forward_x")
        if step == 0:
            assert bool(scale.isnan())
        else:
            expected = np.float32(448.0) / np.float32(max(seen[-3:])) / np.float32(2)
            assert float(scale) == expected
        seen.append(max(amaxes))
        installed.end_step()
    assert float(installed._operands.delayed.inv_scale("linear.forward_w")) == np.float32(224.0) / np.float32(
        linear.weight.abs().max().item()
    )


def test_delayed_codes_saturate_where_values_have_grown() -> None:
    linear = layer(16, 8, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[0, 0] = 1.0
    installed = installed_in(linear, FP8_DELAYED)
    linear(torch.ones(1, 16)).sum().backward()
    installed.end_step()
    assert float(linear(torch.full((1, 16), 8.0)).detach()[0, 0]) == pytest.approx(
        1.0, rel=1e-6
    )  # the scale of amax 1 reaches 1
    installed.end_step()
    assert float(linear(torch.full((1, 16), 8.0)).detach()[0, 0]) == pytest.approx(8.0, rel=1e-6)


def test_evaluation_leaves_histories_alone() -> None:
    linear = layer(16, 8)
    installed = installed_in(linear, FP8_DELAYED)
    linear(gaussian(4, 16)).sum().backward()
    before = copy.deepcopy(installed.state_dict())
    with torch.no_grad():
        linear(gaussian(4, 16) * 100)
    assert same_state(before, installed.state_dict())


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, Tensor):
        return torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
    return bool(a == b)


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8))


def install_all(net: nn.Module, recipe: ProductRecipe, **more: Any) -> InstalledProducts:
    names = {name: "other" for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    return install(net, recipe, names, **more)


def train(net: nn.Module, installed: InstalledProducts, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            net(gaussian(10, 24, seed=100 * step + micro)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        installed.end_step()


def parameters_of(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach().clone()) for name, parameter in net.named_parameters())


@EVERY_RECIPE
def test_a_run_that_is_resumed_is_the_run_that_went_on(recipe: ProductRecipe) -> None:
    net = small_net()
    installed, optimizer = install_all(net, recipe, seed=7), torch.optim.AdamW(net.parameters())
    train(net, installed, optimizer, range(3))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), installed.state_dict()))
    train(net, installed, optimizer, range(3, 6))
    other = small_net(seed=1)
    other_installed, other_optimizer = install_all(other, recipe, seed=0), torch.optim.AdamW(other.parameters())
    for part, state in zip((other, other_optimizer, other_installed), saved, strict=True):
        part.load_state_dict(state)
    train(other, other_installed, other_optimizer, range(3, 6))
    for (name, ours), (_, theirs) in zip(parameters_of(net), parameters_of(other), strict=True):
        assert torch.equal(ours, theirs), name
    assert same_state(installed.state_dict(), other_installed.state_dict())


@EVERY_RECIPE
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_pass_computed_again_changes_nothing(recipe: ProductRecipe, use_reentrant: bool) -> None:
    results = []
    for is_checkpointed in (False, True):
        net = small_net()
        installed = install_all(net, recipe, seed=7)
        x = gaussian(10, 24).requires_grad_()
        for _ in range(2):
            for _ in range(2):
                y = checkpoint(net, x, use_reentrant=use_reentrant) if is_checkpointed else net(x)
                y.square().mean().backward()
            installed.end_step()
        results.append(([p.grad for p in net.parameters()], x.grad, installed.state_dict()))
    (grads, dx, state), (again_grads, again_dx, again_state) = results
    assert dx is not None and again_dx is not None and torch.equal(dx, again_dx)
    assert all(torch.equal(a, b) for a, b in zip(grads, again_grads, strict=True))  # type: ignore[arg-type]
    assert same_state(state, again_state)


def test_stochastic_bits_differ_by_step_micro_batch_layer_rank_and_seed() -> None:
    def gradients(seed: int = 0, rank: int = 0) -> list[Tensor]:
        net = nn.Sequential(layer(32, 32, bias=False), layer(32, 32, bias=False))
        installed = install_all(net, NVFP4, seed=seed, rank=rank)
        found = []
        for _ in range(2):
            for _ in range(2):
                net.zero_grad()
                net[1](gaussian(16, 32)).backward(gaussian(16, 32, seed=2))
                net[0](gaussian(16, 32)).backward(gaussian(16, 32, seed=2))
                found += [net[0].weight.grad.clone(), net[1].weight.grad.clone()]
            installed.end_step()
        return found

    first = gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    every = [*first, gradients(seed=1)[0], gradients(rank=1)[0]]
    for place, one in enumerate(every):
        assert not any(torch.equal(one, other) for other in every[:place])


@EVERY_RECIPE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_hides_a_number_that_is_not_finite(recipe: ProductRecipe, bad: float) -> None:
    linear = layer(32, 16)
    installed = installed_in(linear, recipe)
    run(linear, gaussian(20, 32), gaussian(20, 16))
    installed.end_step()
    x, g = gaussian(20, 32), gaussian(20, 16)
    x[3, 4] = bad
    y, _ = run(linear, x, g)
    assert not bool(torch.isfinite(y[3]).any())
    assert linear.weight.grad is not None and not bool(torch.isfinite(linear.weight.grad[:, 4]).any())
    g[5, 6] = bad
    _, dx = run(linear, gaussian(20, 32), g)
    assert not bool(torch.isfinite(dx[5]).any())
    assert not bool(torch.isfinite(linear.weight.grad[6]).any())
    installed.end_step()
    y, _ = run(linear, gaussian(20, 32), gaussian(20, 16))
    assert bool(torch.isfinite(y).all())  # what was wrong once does not stay


# --- what layers share ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [FP8_DELAYED, FP8_CURRENT], ids=["delayed", "current"])
def test_layers_that_read_one_tensor_share_its_codes(recipe: ProductRecipe) -> None:
    net = nn.ModuleDict({"q": layer(32, 16), "k": layer(32, 16, seed=3), "v": layer(32, 16, seed=5)})
    installed = install_all(net, recipe)
    for step in range(2):
        x = gaussian(8, 32, seed=step)
        kept = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            total = sum(linear(x) for linear in net.values())
        codes = [tensor for tensor in kept if tensor.shape == (8, 32)]
        assert len(codes) == 3 and len({tensor.data_ptr() for tensor in codes}) == 1
        alone = [layer(32, 16, seed=seed) for seed in (1, 3, 5)]
        for linear in alone:
            installed_in(linear, FP8_CURRENT)
        assert torch.allclose(total.detach(), sum(linear(x) for linear in alone).detach(), rtol=0.2, atol=0.05)
        total.sum().backward()
        scales = [installed.state_dict()["delayed"]]
        assert scales
        installed.end_step()
    x = gaussian(8, 32, seed=9)
    first = net["q"](x)
    x += 1.0  # changed in place: its codes are no longer those
    assert not torch.equal(first, net["q"](x))


@EVERY_RECIPE
def test_of_weights_nothing_is_kept_but_the_parameter(recipe: ProductRecipe) -> None:
    linear = layer(32, 48, bias=False)
    installed_in(linear, recipe)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(gaussian(8, 32).requires_grad_())
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() == 32 * 48] == [linear.weight.data_ptr()]
    y = linear(gaussian(8, 32).requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_amaxes_of_shared_codes_are_recorded_for_every_layer() -> None:
    net = nn.ModuleDict({"q": layer(32, 16), "k": layer(32, 16, seed=3)})
    installed = install_all(net, FP8_DELAYED)
    x = gaussian(8, 32)
    (net["q"](x) + net["k"](x)).sum().backward()
    installed.end_step()
    delayed = installed._operands.delayed
    expected = np.float32(448.0) / np.float32(x.abs().max().item())
    assert float(delayed.inv_scale("q.forward_x")) == float(delayed.inv_scale("k.forward_x")) == expected


# --- models and wrappers ----------------------------------------------------------------------------------------------


def test_a_layer_keeps_its_names_and_gets_its_forward_back() -> None:
    net = small_net()
    before = list(net.state_dict())
    expected = net(gaussian(3, 24))
    installed = install_all(net, MXFP8)
    assert list(net.state_dict()) == before
    assert not torch.equal(net(gaussian(3, 24)), expected)
    with pytest.raises(TrainingError, match="forward of its own already"):
        install_all(net, MXFP8)
    installed.remove()
    installed.remove()
    assert torch.equal(net(gaussian(3, 24)), expected)


def test_what_is_no_linear_layer_is_refused_before_anything_changes() -> None:
    net = small_net()
    for name, said in (("1", "a GELU"), ("nowhere", "no module")):
        with pytest.raises(TrainingError, match=said):
            install(net, MXFP8, {"0": "other", name: "other"})
    assert "forward" not in net[0].__dict__


def test_a_class_with_a_forward_of_its_own_is_left_alone_and_said() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    net = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8))
    installed = install_all(net, MXFP8)
    rows = {row.module: row for row in installed.table()}
    assert rows["0"].kernel == "compute dtype" and "Doubled has a forward of its own" in rows["0"].reason
    assert rows["1"].kernel == "emulated" and "far slower than bf16" in rows["1"].reason
    assert "forward" not in net[0].__dict__


def test_why_products_are_emulated() -> None:
    products, reason = choose_products(FP8_DELAYED, "cpu")
    assert products.name == "emulated" and "torch has scaled products on a CPU" in reason
    assert choose_products(FP8_DELAYED, "cuda", emulate=True)[1].endswith("as asked for")


def test_a_copied_model_has_scales_of_its_own() -> None:
    net = small_net()
    installed = install_all(net, FP8_DELAYED)
    net(gaussian(5, 24)).sum().backward()
    before = copy.deepcopy(installed.state_dict())
    copied = copy.deepcopy(net)
    with torch.no_grad():
        copied[0].weight.zero_()
    assert torch.equal(copied(gaussian(5, 24)) != net(gaussian(5, 24)), torch.ones(5, 8, dtype=torch.bool))
    (copied(gaussian(5, 24)) * 100).sum().backward()
    assert same_state(before, installed.state_dict())


def test_a_state_of_other_layers_is_refused() -> None:
    net, other = small_net(), nn.Sequential(nn.Linear(24, 40))
    saved = install_all(other, FP8_DELAYED).state_dict()
    installed = install_all(net, FP8_DELAYED)
    before = copy.deepcopy(installed.state_dict())
    for state, said in (
        (saved, "lacks"),
        ({"draws": saved["draws"]}, "lacks delayed"),
        (install_all(small_net(), fp8_hybrid(Delay(history=5))).state_dict(), "in the model|into the model"),
    ):
        with pytest.raises(TrainingError, match=said):
            installed.load_state_dict(state)
    assert same_state(before, installed.state_dict())


def test_amaxes_are_exchanged_once_a_step() -> None:
    calls = []

    def reduce_amax(amax: Tensor) -> Tensor:
        calls.append(amax.clone())
        return torch.full_like(amax, 4.0)

    net = small_net()
    installed = install_all(net, FP8_DELAYED, reduce_amax=reduce_amax)
    for _ in range(3):
        net(gaussian(5, 24)).sum().backward()
    installed.end_step()
    assert [len(amax) for amax in calls] == [6, 3]  # x and W of three layers; gradients of three
    assert float(installed._operands.delayed.inv_scale("0.forward_x")) == 112.0


def test_under_a_compiler() -> None:
    net = small_net()
    installed = install_all(net, FP8_CURRENT)
    x = gaussian(5, 24)
    expected = net(x)
    compiled = torch.compile(net, backend="eager")
    assert torch.equal(compiled(x), expected)
    compiled(x).sum().backward()
    assert net[0].weight.grad is not None
    installed.end_step()


def test_lost_numbers_are_counted_where_asked_for() -> None:
    linear = layer(16, 8, bias=False)
    installed = installed_in(linear, FP8_DELAYED, counts_lost=True)
    x = torch.ones(4, 16)
    linear(x).sum().backward()
    installed.end_step()
    installed.reset_counters()
    grown = torch.ones(4, 16)
    grown[0, 0], grown[1, 1], grown[2, 2], grown[3, 3] = 8.0, 1e-9, 0.0, torch.inf
    linear(grown).sum().backward()
    lost = installed.counters()["linear", "forward_x"]
    assert (lost.num, lost.zeros, lost.flushed, lost.non_finite) == (64, 1, 1, 1)
    calm = replace(lost, overflowed=0)
    assert calm.flushed_share == 1 / 64


@EVERY_RECIPE
def test_zeros_are_zeros(recipe: ProductRecipe) -> None:
    """A LoRA adapter starts with a matrix of zeros, and padding is tokens of zeros: scales of 0 spoil nothing."""
    linear = layer(32, 16)
    with torch.no_grad():
        linear.weight.zero_()
    installed_in(linear, recipe)
    x = gaussian(8, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert torch.equal(y, linear.bias.bfloat16().expand(8, 16))
    y.backward(gaussian(8, 16).bfloat16())
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(8, 32))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(torch.zeros(8, 32))
    linear.zero_grad()
    y.backward(torch.zeros(8, 16).bfloat16())
    assert linear.weight.grad is not None and torch.equal(linear.weight.grad, torch.zeros(16, 32))
