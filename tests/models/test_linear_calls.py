"""Watching linear operations: every site of six architectures, exactly as often as its module runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.models.linear_calls import LinearCalls, Matrix, matrices_of
from bitwright.models.sites import Site, find_sites, site_weight

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")
ALL = pytest.mark.parametrize("architecture", ARCHITECTURES)
IDS = torch.arange(22).reshape(2, 11) * 7 % 260


def passing(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    return operation(x)


def logits_of(model: nn.Module) -> Tensor:
    return model(IDS).logits


@ALL
def test_every_site_is_seen_as_often_as_its_modules_run(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    plain = [site for site in sites if site.expert is None]
    runs: Counter[str] = Counter()
    hooks = [
        model.get_submodule(use).register_forward_hook(lambda module, args, output, use=use: runs.update([use]))
        for use in {use for site in plain for use in site.uses}
    ]
    seen: Counter[str] = Counter()

    def count(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        seen[matrix.name] += 1
        return operation(x)

    with LinearCalls(model, sites, count):
        logits_of(model)
    for hook in hooks:
        hook.remove()
    for matrix in matrices_of(plain):
        assert seen[matrix.name] == sum(runs[use] for use in matrix.sites[0].uses), matrix.name
        assert seen[matrix.name] >= 1
    assert set(seen) <= {matrix.name for matrix in matrices_of(sites)}


def test_every_expert_is_seen_with_exactly_the_tokens_routed_to_it(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral")
    sites = find_sites(model)
    rows: Counter[str] = Counter()
    chosen: Counter[tuple[int, int]] = Counter()
    routers = {
        site.parameter: int(site.name.split(".")[2]) for site in sites if site.role == "router"
    }  # model.layers.N.…

    def count(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        y = operation(x)
        if matrix.parameter in routers:
            layer = routers[matrix.parameter]
            top = y.reshape(-1, y.shape[-1]).topk(2, dim=-1).indices.flatten().tolist()
            chosen.update((layer, expert) for expert in top)
        elif matrix.expert is not None:
            rows[matrix.name] += x.shape[0]
        return y

    with LinearCalls(model, sites, count):
        logits_of(model)
    experts = [matrix for matrix in matrices_of(sites) if matrix.expert is not None]
    assert len(experts) == 2 * 4 * 2  # layers, experts, gate_up and down
    for matrix in experts:
        layer = int(matrix.parameter.split(".")[2])
        assert matrix.expert is not None
        assert rows[matrix.name] == chosen[layer, matrix.expert], matrix.name
    assert sum(chosen.values()) == 2 * 2 * IDS.numel()


@ALL
def test_watching_changes_nothing_and_sees_the_true_operands(
    make_tiny_model: Callable[..., Any], architecture: str
) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    expected = logits_of(model)
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}

    def check(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        y = operation(x)
        weight = model.get_parameter(matrix.parameter)
        weight = weight if matrix.expert is None else weight[matrix.expert]
        if x.is_floating_point():
            product = x.reshape(-1, x.shape[-1]) @ (weight if matrix.transposed else weight.T)
            bias = matrix.parameter.removesuffix("weight") + "bias"
            product = product + model.get_parameter(bias) if bias in biases else product
            assert torch.allclose(y.reshape(product.shape), product, atol=1e-4)
        else:
            assert torch.equal(y.reshape(-1, weight.shape[1]), weight[x.flatten()])
        return y

    with LinearCalls(model, sites, check):
        watched = logits_of(model)
    assert torch.equal(watched, expected)
    assert torch.equal(logits_of(model), expected)


@ALL
def test_only_the_given_sites_are_handled(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    chosen = [site for site in find_sites(model) if site.role == "attn.out"]
    seen: list[str] = []

    def note(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        seen.append(matrix.name)
        return operation(x)

    with LinearCalls(model, chosen, note):
        logits_of(model)
    assert seen == [site.parameter for site in chosen]
    with LinearCalls(model, [], note):
        logits_of(model)
    assert len(seen) == len(chosen)


def test_a_tied_weight_is_seen_at_the_embedding_and_at_the_head(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("qwen2")
    head = [site for site in find_sites(model) if site.role == "lm_head"]
    kinds: list[bool] = []

    def note(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        kinds.append(x.is_floating_point())
        return operation(x)

    with LinearCalls(model, head, note):
        logits_of(model)
    assert kinds == [False, True]


@ALL
def test_matrices_cover_the_sites_row_by_row(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    model = make_tiny_model(architecture)
    sites = find_sites(model)
    matrices = matrices_of(sites)
    assert sum(len(matrix.sites) for matrix in matrices) == len(sites)
    assert len({matrix.name for matrix in matrices}) == len(matrices)
    for matrix in matrices:
        if len(matrix.sites) == 1:
            continue
        assert len({site.tied_group for site in matrix.sites}) == 1
        stacked = torch.cat([site_weight(model, site) for site in matrix.sites])
        whole = model.get_parameter(matrix.parameter)
        whole = whole if matrix.expert is None else whole[matrix.expert]
        assert torch.equal(stacked, whole.T if matrix.transposed else whole)


# --- calls that no transformer here makes -----------------------------------------------------------------------------


class TwoWays(nn.Module):
    """Calls one weight with keywords, and another matrix of equal values that is no site."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.copy = self.first.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(input=x, weight=self.first.weight) + F.linear(x, self.copy)


def one_site(model: nn.Module) -> list[Site]:
    return list(find_sites(model))


def test_keyword_calls_are_seen_and_equal_values_elsewhere_are_not() -> None:
    model = TwoWays().requires_grad_(False)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    seen: list[str] = []

    def doubled(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        seen.append(matrix.name)
        return operation(2 * x)

    with LinearCalls(model, one_site(model), doubled):
        y = model(x)
    assert seen == ["first.weight"]
    assert torch.allclose(y, 3 * x @ model.copy.T, atol=1e-6)


def test_gradients_flow_through_a_watched_call() -> None:
    model = TwoWays()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with LinearCalls(model, one_site(model), passing):
        model(x).sum().backward()
    assert model.first.weight.grad is not None
    assert torch.allclose(model.first.weight.grad, x.detach().sum(0).expand(3, 4))


def test_the_context_ends_when_the_block_raises() -> None:
    model = TwoWays().requires_grad_(False)
    calls: list[str] = []

    def note(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        calls.append(matrix.name)
        return operation(x)

    with pytest.raises(KeyError), LinearCalls(model, one_site(model), note):
        raise KeyError
    model(torch.ones(1, 4))
    assert not calls


def test_one_watcher_can_be_entered_again_after_weights_moved() -> None:
    model = TwoWays().requires_grad_(False)
    seen: list[str] = []

    def note(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
        seen.append(matrix.name)
        return operation(x)

    watcher = LinearCalls(model, one_site(model), note)
    with watcher:
        model(torch.ones(1, 4))
    model.first.weight.data = model.first.weight.data.clone()
    with watcher:
        model(torch.ones(1, 4))
    assert seen == ["first.weight"] * 2


def test_watchers_nest() -> None:
    model = TwoWays().requires_grad_(False)
    order: list[str] = []

    def noting(name: str) -> Callable[..., Tensor]:
        def note(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
            order.append(name)
            return operation(x)

        return note

    with LinearCalls(model, one_site(model), noting("outer")), LinearCalls(model, one_site(model), noting("inner")):
        model(torch.ones(1, 4))
    assert order == ["inner", "outer"]
