"""Which optimizers may work on pieces: tried on torch's own and on some that torch does not have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bitwright.training.optimizer.elementwise import why_not_elementwise


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675: the sign of an average."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(average, p.grad, 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


class TrustRatio(Lion):
    """LARS and LAMB: a step as long as its parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-float(group["lr"] * p.norm() / p.grad.norm()))


class Nested(torch.optim.Optimizer):
    """Lookahead, SAM and their like: an optimizer around another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]


ELEMENTWISE = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.0),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-9),
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Lion, not from torch": Lion,
}
OTHERS = {
    "Adafactor": (lambda p: torch.optim.Adafactor(p), "depends on other elements"),
    "Muon": (lambda p: torch.optim.Muon(p[:1]), "one step on a small flat piece says"),
    "LBFGS": (lambda p: torch.optim.LBFGS(p), "parameters of its own in `_params`"),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p), "one step on a small matrix says"),
    "LARS": (TrustRatio, "depends on other elements"),
    "one around another": (lambda p: Nested(torch.optim.SGD(p, lr=0.1)), "parameters of its own in `inner`"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_are_taken(name: str) -> None:
    assert why_not_elementwise(ELEMENTWISE[name](parameters())) is None


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_with_a_reason(name: str) -> None:
    make, said = OTHERS[name]
    assert said in (why_not_elementwise(make(parameters())) or "")


def test_every_optimizer_of_torch_is_in_one_of_the_lists() -> None:
    known = {name.split()[0] for name in (*ELEMENTWISE, *OTHERS)} | {"Adam", "Optimizer"}
    offered = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    assert offered <= known


def test_each_group_is_asked() -> None:
    first, second = parameters()

    class Mixed(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    size = p.grad.norm() if group["is_matrix"] else 1.0
                    p.sub_(group["lr"] * p.grad / size)

    optimizer = Mixed([{"params": [second], "is_matrix": False}, {"params": [first], "is_matrix": True}])
    assert (why_not_elementwise(optimizer) or "").endswith("(parameter group 1)")


def test_asking_changes_nothing() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert why_not_elementwise(optimizer) is None
    assert str(before) == str(optimizer.state_dict()) and calls == [1]
    assert all(torch.equal(p, v) for p, v in zip(optimizer.param_groups[0]["params"], values, strict=True))
    scheduler.step()
