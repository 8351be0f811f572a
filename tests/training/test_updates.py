"""Steps on stand-ins: each rule against a closed form, NumPy's rounding or fp32 itself; any optimizer; resuming."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitwright import formats
from bitwright.errors import TrainingError, UnknownName
from bitwright.training.optimizer.draws import Draws
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.update import UPDATES

NARROW_RULES = ("nearest", "stochastic", "kahan")


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have: a group of its own counts steps, a state is named as none of torch's."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.1, "taken": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(torch.lerp(average, p.grad, 0.1).sign_(), alpha=-group["lr"])
                    average.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
    "lion": Lion,
}


def make_parameters(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(13, 7), (), (64,), (3, 4, 5), (1,)]
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.5 + 1).bfloat16().to(dtype)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in parameters:
        gradient = (torch.randn(p.shape, generator=generator) * 0.1).bfloat16()
        p.grad_dtype = dtype or p.dtype
        p.grad = gradient.to(dtype or p.dtype)


def updated(name: str, rule: str, num_steps: int = 4, **settings: Any) -> tuple[list[nn.Parameter], Update]:
    parameters = make_parameters()
    update = Update(OPTIMIZERS[name](parameters), UPDATES[rule], **settings)
    for step in range(num_steps):
        give_gradients(parameters, step)
        update.step()
    return parameters, update


def fp32_step(name: str, start: list[Tensor], step: int) -> list[Tensor]:
    """The first step of torch's own optimizer on fp32 copies."""
    copies = [nn.Parameter(value.detach().float()) for value in start]
    optimizer = OPTIMIZERS[name](copies)
    give_gradients(copies, step)
    optimizer.step()
    return [p.detach() for p in copies]


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[key].dtype and torch.equal(value, other[key])
        else:
            assert value == other[key]


# --- each rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nearest_is_the_fp32_step_rounded_once(name: str) -> None:
    parameters, _ = updated(name, "nearest", 1)
    for p, exact in zip(parameters, fp32_step(name, list(make_parameters()), 0), strict=True):
        assert torch.allclose(p.float(), exact.bfloat16().float(), rtol=2.0**-7) and p.dtype == torch.bfloat16
        if name != "adamw fused":  # its kernel rounds the ends of a long tensor otherwise
            assert torch.equal(p, exact.bfloat16())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stochastic_draws_the_words_of_the_formats_own_rounding(name: str) -> None:
    parameters, _ = updated(name, "stochastic", 1, seed=77)
    exact = torch.cat([value.reshape(-1) for value in fp32_step(name, list(make_parameters()), 0)]).numpy()
    seed = Draws(77).seed_of("parameter", 0)
    expected = formats.round("bf16", exact, "stochastic", "ieee", seed=seed)
    found = torch.cat([p.detach().float().reshape(-1) for p in parameters]).numpy()
    if name == "adamw fused":
        assert (np.abs(found - expected) <= 2.0**-7 * np.abs(exact)).all()
    else:
        assert np.array_equal(found, expected.astype(np.float32))


def test_stochastic_is_right_on_average() -> None:
    """100,000 weights at 1, an update of 0.3 of a step (2⁻⁷): the share that moves has a standard error of 0.15 %."""
    weight = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["stochastic"], seed=3)
    weight.grad = torch.full_like(weight, -0.3 * 2.0**-7)
    update.step()
    exact = 1 + float(torch.tensor(0.3 * 2.0**-7).bfloat16())
    assert set(weight.detach().unique().tolist()) == {1.0, 1 + 2.0**-7}
    assert float(weight.detach().double().mean()) == pytest.approx(exact, abs=4 * 2.0**-7 * 0.46 / 100_000**0.5)


def test_steps_do_not_share_their_random_bits() -> None:
    weight = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["stochastic"], seed=3)
    moved = []
    for _ in range(2):
        weight.data.fill_(1.0)
        weight.grad = torch.full_like(weight, -0.5 * 2.0**-7)
        update.step()
        moved.append(weight.detach() > 1)
    assert 0.22 < float((moved[0] & moved[1]).double().mean()) < 0.28


def test_kahan_is_optimis_update_where_no_sum_of_it_is_rounded() -> None:
    """comp += u; old = p; p += comp; comp += old − p, in bf16, for updates that are small multiples of 2⁻¹⁵."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.full((500,), 1.5, dtype=torch.bfloat16))
    update = Update(torch.optim.SGD([weight], lr=1.0), UPDATES["kahan"])
    p, comp = weight.detach().clone(), torch.zeros(500, dtype=torch.bfloat16)
    for _ in range(200):
        u = (torch.randint(-20, 22, (500,), generator=generator) * 2.0**-15).bfloat16()
        weight.grad = -u
        update.step()
        comp = comp + u
        old = p
        p = p + comp
        comp = comp + (old - p)
        assert torch.equal(weight, p)
        assert torch.equal(update.optimizer.state[weight]["compensation"], comp)
    assert not torch.equal(p, torch.full_like(p, 1.5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kahan_follows_fp32_masters(name: str) -> None:
    narrow = make_parameters()
    wide = make_parameters(torch.float32)
    update, optimizer = Update(OPTIMIZERS[name](narrow), UPDATES["kahan"]), OPTIMIZERS[name](wide)
    for step in range(50):
        give_gradients(narrow, step), give_gradients(wide, step)
        update.step(), optimizer.step()
    for p, exact in zip(narrow, wide, strict=True):
        total = p.float() + update.optimizer.state[p]["compensation"].float()
        moved = (exact - 1).abs().max()
        assert (total - exact).abs().max() < 50 * 2.0**-17 and moved > 0.01


@pytest.mark.parametrize("rule", ["stochastic", "kahan"])
def test_weight_decay_happens(rule: str) -> None:
    """lr · decay = 5e−4 is far below half a step; 400 steps shrink a weight by e^−0.2."""
    weight = nn.Parameter(torch.full((2000,), 1.7, dtype=torch.bfloat16))
    update = Update(torch.optim.AdamW([weight], lr=5e-3, weight_decay=0.1), UPDATES[rule], seed=1)
    for _ in range(400):
        weight.grad = torch.zeros_like(weight)
        update.step()
    start = float(torch.tensor(1.7).bfloat16())
    assert float(weight.detach().double().mean()) == pytest.approx(start * (1 - 5e-4) ** 400, rel=5e-3)


def test_fp32_parameters_beside_bf16_ones_are_their_own_stand_ins() -> None:
    narrow, wide = make_parameters()[0], make_parameters(torch.float32)[2]
    reference = nn.Parameter(wide.detach().clone())
    update = Update(torch.optim.AdamW([narrow, wide], lr=1e-3), UPDATES["stochastic"])
    plain = torch.optim.AdamW([reference], lr=1e-3)
    for step in range(3):
        give_gradients([narrow], step), give_gradients([wide], step), give_gradients([reference], step)
        update.step(), plain.step()
    assert torch.equal(wide, reference) and wide.dtype == torch.float32


def test_with_nothing_narrow_a_step_is_the_optimizers_own() -> None:
    ours, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    update = Update(torch.optim.LBFGS(ours), UPDATES["fp32"])
    assert update.is_plain
    update = Update(torch.optim.Adafactor(ours), UPDATES["fp32"])
    plain = torch.optim.Adafactor(theirs)
    for step in range(3):
        give_gradients(ours, step), give_gradients(theirs, step)
        update.step(), plain.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_kept_in_their_format(name: str, moments: str) -> None:
    parameters, update = updated(name, "stochastic", moments=moments)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[moments]
    for p in parameters:
        state = update.optimizer.state[p]
        kept = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape}
        assert kept, "the optimizer has moments"
        for key, value in kept.items():
            if p.numel() > 1:
                assert value.dtype == dtype and (f"{key}_scale" in state) == (moments == "fp16")
        if "step" in state:
            assert state["step"].dtype == torch.float32 and float(state["step"]) == 4


@pytest.mark.parametrize("moments", ["bf16", "fp16"])
def test_narrow_moments_follow_wide_ones(moments: str) -> None:
    """fp32 parameters, moments in 16 bits: 100 steps of Adam stay near torch's own."""
    ours, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    update = Update(OPTIMIZERS["adamw"](ours), UPDATES["fp32"], moments=moments)
    plain = OPTIMIZERS["adamw"](theirs)
    assert not update.is_plain
    for step in range(100):
        give_gradients(ours, step), give_gradients(theirs, step)
        update.step(), plain.step()
    for a, b, start in zip(ours, theirs, make_parameters(torch.float32), strict=True):
        error, way = (a - b).detach().norm(), (b - start).detach().norm()
        assert float(error / way) <= {"bf16": 0.08, "fp16": 0.01}[moments]


def test_moments_of_a_plain_optimizer_are_taken_over() -> None:
    parameters = make_parameters(torch.float32)
    optimizer = OPTIMIZERS["adamw"](parameters)
    give_gradients(parameters, 0)
    optimizer.step()
    before = [optimizer.state[p]["exp_avg_sq"].clone() for p in parameters]
    update = Update(optimizer, UPDATES["fp32"], moments="fp16", batch_elements=20)
    give_gradients(parameters, 1)
    update.step()
    for p, old in zip(parameters, before, strict=True):
        state = optimizer.state[p]
        if p.numel() > 1:
            assert state["exp_avg_sq"].dtype == torch.float16
            scale = state["exp_avg_sq_scale"].repeat_interleave(20)[: p.numel()].view(p.shape)
            exact = old * 0.999 + p.grad.square() * 0.001  # type: ignore[union-attr]
            assert torch.allclose(state["exp_avg_sq"].float() * scale, exact, rtol=2e-3)


# --- any optimizer ----------------------------------------------------------------------------------------------------

TORCHS = {
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "Adam, decay in the gradient": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
}


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TORCHS)
def test_every_elementwise_optimizer_of_torch(name: str, moments: str) -> None:
    """In pieces, with a state_dict saved and loaded on the way: near torch's own on fp32 parameters."""
    narrow, wide = make_parameters(), make_parameters(torch.float32)
    update = Update(TORCHS[name](narrow), UPDATES["kahan"], moments=moments, batch_elements=20)
    plain = TORCHS[name](wide)
    for step in range(12):
        give_gradients(narrow, step), give_gradients(wide, step)
        update.step(), plain.step()
        if step == 6:
            update.optimizer.load_state_dict(copy.deepcopy(update.optimizer.state_dict()))
    for p, exact, start in zip(narrow, wide, make_parameters(torch.float32), strict=True):
        total = p.float() + update.optimizer.state[p]["compensation"].float()
        error, way = (total - exact).detach().norm(), (exact - start).detach().norm()
        assert float(error) < (0.1 if moments == "bf16" else 0.01) * float(way) + 2.0**-16


# --- pieces and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["nearest", "kahan"])
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lion"])
@pytest.mark.parametrize("batch_elements", [1, 5, 17, 64])
def test_where_parameters_are_cut_changes_nothing(name: str, rule: str, batch_elements: int) -> None:
    whole, one = updated(name, rule)
    pieces, other = updated(name, rule, batch_elements=batch_elements)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    for a, b in zip(whole, pieces, strict=True):
        assert_same_state(one.optimizer.state[a], other.optimizer.state[b])


def test_a_step_takes_a_bounded_amount_of_memory() -> None:
    """Most fp32 numbers that are alive beside the model at once, seen by the optimizer itself."""
    seen: list[int] = []

    class Watching(Lion):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
            super().step()

    parameters = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (1000, 30, 30, 250)]
    update = Update(Watching(parameters), UPDATES["stochastic"], batch_elements=100)
    seen.clear()  # of the question whether it is elementwise
    for p in parameters:
        p.grad = torch.ones_like(p)
    update.step()
    assert max(seen) <= 100 and sum(seen) == 1310


@pytest.mark.parametrize("rule", NARROW_RULES)
def test_parameters_with_gaps_in_memory(rule: str) -> None:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    start = base.t().contiguous()
    turned, straight = nn.Parameter(base.t()), nn.Parameter(start.clone())
    for p in (turned, straight):
        update = Update(torch.optim.AdamW([p], lr=0.1), UPDATES[rule], batch_elements=11)
        for _ in range(3):
            p.grad = torch.ones(8, 6, dtype=torch.bfloat16).cumsum(0)
            update.step()
    assert torch.equal(turned, straight) and not torch.equal(straight, start)


def test_a_failing_step_leaves_the_optimizer_whole() -> None:
    parameters = make_parameters()
    optimizer = Lion(parameters)
    update = Update(optimizer, UPDATES["stochastic"])
    give_gradients(parameters, 0)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        update.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
    assert all(torch.equal(p, q) for p, q in zip(parameters, make_parameters(), strict=True))


def test_parameters_without_a_gradient_stay() -> None:
    parameters = make_parameters()
    update = Update(OPTIMIZERS["adamw"](parameters), UPDATES["kahan"])
    give_gradients(parameters[:2], 0)
    update.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters[2:], make_parameters()[2:], strict=True))
    assert set(map(id, update.optimizer.state)) == set(map(id, parameters[:2]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_gradients_of_bf16_parameters_are_used_as_they_are(name: str) -> None:
    one, other = make_parameters(), make_parameters()
    for parameters, dtype in ((one, None), (other, torch.float32)):
        update = Update(OPTIMIZERS[name](parameters), UPDATES["nearest"])
        give_gradients(parameters, 0, dtype)
        update.step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_scheduler_moves_the_learning_rate() -> None:
    parameters = make_parameters()
    optimizer = OPTIMIZERS["adamw"](parameters)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    update = Update(optimizer, UPDATES["stochastic"])
    for step in range(2):
        give_gradients(parameters, step)
        update.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_a_groups_own_counter_counts_steps_and_not_batches() -> None:
    _, update = updated("lion", "stochastic", 3, batch_elements=7)
    assert update.optimizer.param_groups[0]["taken"] == 3


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rule", NARROW_RULES)
@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd momentum", "lion"])
def test_resuming_is_not_having_stopped(name: str, rule: str, moments: str) -> None:
    settings = {"moments": moments, "seed": 5, "batch_elements": 50}
    straight, whole = updated(name, rule, 6, **settings)
    parameters, stopped = updated(name, rule, 3, **settings)
    saved = copy.deepcopy((stopped.optimizer.state_dict(), stopped.state_dict()))
    resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
    update = Update(OPTIMIZERS[name](resumed), UPDATES[rule], **{**settings, "seed": 0})  # type: ignore[arg-type]
    update.optimizer.load_state_dict(saved[0])
    update.load_state_dict(saved[1])
    for step in range(3, 6):
        give_gradients(resumed, step)
        update.step()
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))
    for a, b in zip(straight, resumed, strict=True):
        assert_same_state(whole.optimizer.state[a], update.optimizer.state[b])


def test_torch_alone_would_cast_what_is_loaded() -> None:
    parameters, update = updated("adamw", "stochastic")
    saved = copy.deepcopy(update.optimizer.state_dict())
    update.close()
    update.optimizer.load_state_dict(saved)
    assert update.optimizer.state[parameters[0]]["exp_avg"].dtype == torch.bfloat16


def test_a_state_of_another_rule_is_refused() -> None:
    _, update = updated("adamw", "kahan", 1)
    _, other = updated("adamw", "stochastic", 1)
    with pytest.raises(TrainingError, match=r"checkpoint's rule is 'kahan', and this run's 'stochastic'"):
        other.load_state_dict(update.state_dict())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.optim.Adafactor(make_parameters()), "Adafactor does not treat every number by itself"),
        (lambda: torch.optim.Muon(make_parameters()[:1]), "Muon does not treat every number by itself"),
        (lambda: torch.optim.LBFGS(make_parameters()), "LBFGS does not treat every number by itself"),
        (lambda: torch.optim.AdamW([nn.Parameter(torch.ones(3).half())]), "stores fp32 and bf16 parameters"),
        (lambda: torch.optim.AdamW(make_parameters(), eps=1e-60), "eps=1e-60 is 0 in fp32"),
        (lambda: torch.optim.SGD(make_parameters(), lr=torch.tensor(1e-3).bfloat16()), "lr is a tensor of torch.bf"),
    ],
)
def test_what_cannot_be_stepped_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        Update(make(), UPDATES["stochastic"])


def test_bf16_parameters_are_no_masters() -> None:
    with pytest.raises(TrainingError, match=r"'fp32' stores fp32 parameters.*torch.bfloat16.*dtype=torch.float32"):
        Update(OPTIMIZERS["adamw"](make_parameters()), UPDATES["fp32"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean 'stochastic'"):
        UPDATES["stochstic"]
    with pytest.raises(TrainingError, match=r"moments are kept in fp32, bf16, fp16, not in 'int8'"):
        Update(OPTIMIZERS["adamw"](make_parameters()), UPDATES["kahan"], moments="int8")


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True).bfloat16()
    update = Update(torch.optim.SGD(embedding.parameters(), lr=0.1), UPDATES["stochastic"])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingError, match="sparse=False"):
        update.step()


@pytest.mark.parametrize("rule", list(UPDATES))
def test_a_rule_is_complete(rule: str) -> None:
    record = UPDATES[rule]
    assert record.description and record.source and "fp32" in record.parameters
    assert record.rounding in formats.ROUNDINGS and record.moment_rounding in formats.ROUNDINGS
