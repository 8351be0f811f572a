"""What casting a model to bf16 takes away is not lost under a rule that keeps what rounding takes away."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bitwright.training import prepare
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.optimizer.remainder import hand_on, waiting_remainders
from bitwright.training.policy import policy_named

#: p and c together: 8 bits of p, 8 of c below half a step of p.
BITS = 2.0**-17


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def step(policy: str, steps: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.1)
    run = prepare(trained, optimizer, policy=policy)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        with run.step() as block:
            block.backward(trained(x).square().mean())
    return trained, optimizer


def whole(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    return parameter.float() + optimizer.state[parameter]["compensation"].float()


def test_a_cast_model_begins_where_the_fp32_model_was() -> None:
    trained, optimizer = step("bf16-pure-kahan", 0, 1e-3)
    for parameter, exact in zip(trained.parameters(), model().parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16 and not torch.equal(parameter.float(), exact)
        assert ((whole(parameter, optimizer) - exact).abs() <= BITS * exact.abs()).all()


def test_steps_far_below_the_grid_are_those_of_fp32() -> None:
    """Ten steps of 1e-6 at weights of 0.25, whose bf16 neighbours lie 1e-3 apart."""
    trained, optimizer = step("bf16-pure-kahan", 10, 1e-6)
    exact, _ = step("bf16-mixed", 10, 1e-6)
    before = model()
    for parameter, wanted, start in zip(trained.parameters(), exact.parameters(), before.parameters(), strict=True):
        moved = whole(parameter, optimizer) - start
        # c is rounded once a step
        assert ((moved - (wanted - start)).abs() <= 11 * BITS * start.abs() + 2e-6).all()


def test_other_rules_keep_nothing() -> None:
    trained, optimizer = step("bf16-pure-sr", 0, 1e-3)
    assert not optimizer.state and not waiting_remainders(trained.named_parameters())


def test_what_overflows_leaves_nothing() -> None:
    cast = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        cast.weight.copy_(torch.tensor([[3.4e38, float("nan")]]))
    cast_parameters(cast, policy_named("bf16-pure-kahan"))
    assert waiting_remainders(cast.named_parameters())["weight"].tolist() == [[0.0, 0.0]]


@pytest.fixture
def alone(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_shards_take_their_part_along() -> None:
    sharded = model()
    cast_parameters(sharded, policy_named("bf16-pure-kahan"))
    waiting = copy.deepcopy(waiting_remainders(sharded.named_parameters()))
    assert set(waiting) == {name for name, _ in sharded.named_parameters()}
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    assert not waiting_remainders(sharded.named_parameters())
    hand_on(waiting, sharded.named_parameters())
    for name, remainder in waiting_remainders(sharded.named_parameters()).items():
        assert torch.equal(remainder, waiting[name])
