"""The kinds of `test_cases_*` again, through `prepare`: what a user's loop meets, under the policies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training import POLICIES, TrainingRun, policy_named, prepare

PLAIN = [name for name, policy in POLICIES.items() if policy.products is None and name != "tf32"]


class Scale(nn.Module):
    """A vector of weights; the loss is their weighted sum, so that the weights' gradient is what is put in."""

    def __init__(self, num: int = 64, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num,), start))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.to(self.weight.dtype)).float().sum()


def made(policy: str, lr: float = 0.1, num: int = 64, **settings: object) -> tuple[Scale, TrainingRun]:
    model = Scale(num)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, prepare(model, optimizer, policy=policy, **settings)  # type: ignore[arg-type]


def step(model: Scale, run: TrainingRun, *batches: Tensor) -> None:
    with run.step() as block:
        for batch in batches:
            block.backward(model(batch))


@pytest.mark.parametrize("num_bad", [144, 170])
def test_many_bad_batches_and_a_good_one(num_bad: int) -> None:
    model, run = made("fp16-mixed")
    for _ in range(num_bad):
        step(model, run, torch.full((64,), math.inf))
    assert run.counters.skipped == num_bad and torch.equal(model.weight, torch.ones(64))
    step(model, run, torch.ones(64))
    assert torch.allclose(model.weight, torch.full((64,), 0.9)) and run.scale == 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("policy", PLAIN)
def test_a_bad_batch_is_skipped_and_named_under_every_policy(policy: str, bad: float) -> None:
    def end(batches: list[float]) -> tuple[Tensor, TrainingRun]:
        model = Scale()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        run = prepare(model, optimizer, policy=policy, scheduler=scheduler, max_grad_norm=1.0, seed=3)
        for value in batches:
            step(model, run, torch.linspace(-1, 1, 64) * value)
            if not math.isfinite(value):
                assert run.last is not None and "micro-batch 1 of 1 is" in str(run.last.skipped)
        return model.weight.detach(), run

    weight, run = end([1.0, bad, 2.0])
    clean, other = end([1.0, 2.0])
    assert torch.equal(weight, clean) and run.counters.skipped == 1
    rates = [r.optimizer.param_groups[0]["lr"] for r in (run, other)]
    assert rates[0] == rates[1] == pytest.approx(0.0025)


@pytest.mark.parametrize("policy", PLAIN)
def test_a_gradient_is_looked_at_though_the_loss_is_finite(policy: str) -> None:
    model, run = made(policy)
    with run.step() as block:
        block.backward((model.weight.float() * 0.0).sqrt().sum())  # 0, with a gradient of 0 · Inf
    assert run.last is not None and str(run.last.skipped).startswith("the gradient of weight is not finite")
    assert run.last.loss == 0.0 and (model.weight == 1).all()


@pytest.mark.parametrize("policy", PLAIN)
def test_finite_gradients_of_any_size_are_clipped_to_their_length(policy: str) -> None:
    model, run = made(policy, lr=1.0, max_grad_norm=1.0)
    size = 1e30 if run.scaler is None else 1e20 / 2.0**16
    step(model, run, torch.full((64,), size))
    assert run.last is not None and run.last.skipped is None
    assert torch.allclose(model.weight.float(), torch.full((64,), 1 - 1 / 8), rtol=2.0**-7)


@pytest.mark.parametrize(
    ("policy", "moves"), [("bf16-pure", False), ("bf16-pure-sr", True), ("bf16-pure-kahan", True), ("bf16-mixed", True)]
)
def test_small_updates(policy: str, moves: bool) -> None:
    """A hundred steps of 2⁻¹¹ on weights of 1 are 0.05 together, and none of them is half a step of bf16."""
    model, run = made(policy, lr=1.0, num=4096)
    for _ in range(100):
        step(model, run, torch.full((4096,), -(2.0**-11)))
    moved = float((model.weight.detach().double() - 1).mean())
    assert moved == pytest.approx(100 * 2.0**-11 if moves else 0.0, rel=0.1)


@pytest.mark.parametrize("policy", PLAIN)
def test_micro_batches_are_added_in_fp32(policy: str) -> None:
    """512 micro-batches: a sum in bf16 of their equal shares stops half way."""
    model, run = made(policy, lr=0.25, accumulate=512)
    step(model, run, *[torch.ones(64)] * 512)
    assert run.last is not None and run.last.grad_norm == pytest.approx(8.0, rel=1e-3)
    assert torch.allclose(model.weight.float(), torch.full((64,), 0.75), rtol=2.0**-7)


@pytest.mark.parametrize("policy", PLAIN)
def test_gradients_are_unscaled_and_clipped_once_a_step(policy: str) -> None:
    """Four micro-batches, each a quarter of the same gradient, are one batch: in every one of several steps."""

    def end(accumulate: int) -> Tensor:
        model, run = made(policy, lr=0.5, accumulate=accumulate, max_grad_norm=1.0, seed=1)
        for number in range(4):
            step(model, run, *[torch.linspace(-1, 2, 64).bfloat16().float() * 2.0**number] * accumulate)
        return model.weight.detach()

    assert torch.equal(end(1), end(4))


# --- a guard of 1e−8 --------------------------------------------------------------------------------------------------


class Ranked(nn.Module):
    """Scores, spread over 0 to 1 with a guard of 1e−8 against equal ones; in the dtype they come in, or in fp32."""

    def __init__(self, widens: bool = False) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1, bias=False)
        nn.init.constant_(
            self.score.weight, 0.25
        )  # unequal scores lie 1.5 apart, so that no gradient of theirs overflows
        self.widens = widens

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1)
        scores = scores.float() if self.widens else scores
        low, high = scores.min(), scores.max()
        return ((scores - low) / (high - low + 1e-8)).float().mean() + scores.float().mean()


EQUAL, UNEQUAL = torch.ones(4, 8), torch.linspace(0, 1, 32).view(4, 8)


@pytest.mark.parametrize("policy", PLAIN)
def test_a_guard_that_fp16_does_not_hold(policy: str) -> None:
    """1e−8 is 0 in fp16, so equal scores are 0 / 0: such a batch is left out, and the run says why it stands still."""
    model = Ranked()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, patience=3, seed=1)
    start = model.score.weight.detach().clone()
    for batch in (EQUAL, UNEQUAL, EQUAL):
        with run.step() as block:
            block.backward(model(batch))
        assert model.score.weight.isfinite().all()
    vanishes = policy_named(policy).compute == "fp16"
    assert run.counters.skipped == (2 if vanishes else 0)
    assert not torch.equal(model.score.weight, start)
    if vanishes:
        assert run.last is not None and "the loss of micro-batch 1 of 1 is nan" in str(run.last.skipped)
        with pytest.raises(TrainingError, match=r"3 steps in a row were skipped.*micro-batch 1 of 1 is nan"):
            for _ in range(2):
                with run.step() as block:
                    block.backward(model(EQUAL))


@pytest.mark.parametrize("policy", PLAIN)
def test_in_fp32_the_guard_holds_under_every_policy(policy: str) -> None:
    model = Ranked(widens=True)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy, seed=1)
    with run.step() as block:
        block.backward(model(EQUAL))
    assert run.last is not None and run.last.skipped is None and run.last.loss == pytest.approx(run.last.loss)


# --- a ramp -----------------------------------------------------------------------------------------------------------


class Ramped(nn.Module):
    """A frozen layer and an adapter whose part grows: y = W x + f · A Aᵀ x."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.base.weight.data.copy_(torch.eye(64))
        start = torch.rand(64, 16, generator=generator) * 0.5 + 0.5
        self.adapter = nn.Parameter(start.bfloat16().float())

    def forward(self, x: Tensor, factor: float) -> Tensor:
        added = (x @ self.adapter) @ self.adapter.t()
        return (self.base(x) + factor * added).float().square().mean()


def moved_on_a_ramp(policy: str) -> Tensor:
    """How far 64 steps take the adapter while its factor grows from 1e−4 to 6.4e−3."""
    model = Ramped()
    start = model.adapter.detach().double()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.02), policy=policy, seed=1)
    x = torch.rand(32, 64, generator=torch.Generator().manual_seed(1))
    for number in range(1, 65):
        with run.step() as block:
            block.backward(model(x, number / 10_000))
    return model.adapter.detach().double() - start


@pytest.mark.parametrize("policy", PLAIN)
def test_small_factors_of_a_ramp_still_train(policy: str) -> None:
    """Each gradient is as small as the factor; what rounding to nearest swallows of it every other policy keeps."""
    exact, moved = moved_on_a_ramp("fp32"), moved_on_a_ramp(policy)
    share = float((moved * exact).sum() / (exact * exact).sum())
    assert share == pytest.approx(0.0 if policy == "bf16-pure" else 1.0, abs=0.15)
