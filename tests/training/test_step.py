"""A step: what it covers, what it skips and says, and that a skipped one leaves everything as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.integrations.loop_driver import LoopDriver
from bitwright.training.policy import POLICIES
from bitwright.training.prepare import prepare
from bitwright.training.run import TrainingRun
from bitwright.training.step import StepResult

X = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)
NAN = torch.full_like(X, torch.nan)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def new_run(policy: Any = "bf16-mixed", **changes: Any) -> TrainingRun:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return prepare(model, optimizer, policy=policy, scheduler=scheduler, **changes)


def loss_of(run: TrainingRun, x: Tensor = X) -> Tensor:
    return run.model(x).float().square().mean()


def take(run: TrainingRun, *micro_batches: Tensor) -> StepResult | None:
    with run.step() as step:
        for x in micro_batches:
            step.backward(loss_of(run, x))
    return step.result


def everything(run: TrainingRun) -> Any:
    return copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def rate(run: TrainingRun) -> float:
    return float(run.optimizer.param_groups[0]["lr"])


def test_autocast_covers_the_forward_pass_only() -> None:
    run = new_run()
    seen: dict[str, bool] = {}

    def during_backward(gradient: Tensor) -> None:
        seen["backward"] = torch.is_autocast_enabled("cpu")

    with run.step() as step:
        seen["forward"] = torch.is_autocast_enabled("cpu")
        loss = loss_of(run)
        loss.register_hook(during_backward)
        step.backward(loss)
        seen["after"] = torch.is_autocast_enabled("cpu")
    seen["outside"] = torch.is_autocast_enabled("cpu")
    assert seen == {"forward": True, "backward": False, "after": False, "outside": False}


def test_every_micro_batch_has_its_forward_region() -> None:
    run = new_run(accumulate=2)
    with run.step() as step:
        step.backward(loss_of(run))
        assert torch.is_autocast_enabled("cpu")
        step.backward(loss_of(run))
        assert not torch.is_autocast_enabled("cpu")


def test_islands_are_there_in_the_forward_pass() -> None:
    run = new_run()
    with run.step() as step:
        assert X.bfloat16().logsumexp(-1).dtype == torch.float32
        step.backward(loss_of(run))
        assert X.bfloat16().logsumexp(-1).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "policy", ["bf16-mixed", "fp16-mixed", "bf16-pure-sr", "bf16-pure-kahan", "fp8-hybrid", "fp32"]
)
def test_a_skipped_step_leaves_everything_as_it_was(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(policy)
    take(run, X)
    before, learning_rate = everything(run), rate(run)
    result = take(run, NAN)
    assert result is not None and result.skipped is not None and math.isnan(result.loss) and result.grad_norm is None
    assert "the loss of micro-batch 1 of 1 is nan" in result.skipped
    assert same(everything(run), before)
    assert rate(run) == learning_rate
    assert (run.counters.steps, run.counters.updates, run.counters.skipped) == (2, 1, 1)
    assert "step 1 was skipped" in caplog.text
    assert all(parameter.grad is None for parameter in run.model.parameters())
    after = take(run, X)
    assert after is not None and after.skipped is None and rate(run) == learning_rate / 2


def test_the_micro_batch_is_named() -> None:
    run = new_run(accumulate=3)
    result = take(run, X, NAN, X)
    assert result is not None and str(result.skipped).startswith("the loss of micro-batch 2 of 3 is nan")


def test_losses_of_both_infinities_are_skipped_too() -> None:
    """They have no sum."""
    run = new_run(accumulate=2)
    with run.step() as step:
        for sign in (1, -1):
            step.backward(loss_of(run) * sign * torch.inf)
    assert run.last is not None and run.last.skipped is not None and "micro-batch 1 of 2 is inf" in run.last.skipped
    assert run.last.loss != run.last.loss


def test_a_gradient_that_is_not_finite_is_named() -> None:
    run = new_run()
    weight = run.model.get_parameter("2.weight")
    handle = weight.register_hook(lambda gradient: gradient / 0)
    result = take(run, X)
    handle.remove()
    assert result is not None and result.skipped == "the gradient of 2.weight is not finite"
    assert math.isfinite(result.loss)


def test_a_loss_of_nothing_is_skipped() -> None:
    """Every label masked: the loss is NaN and its gradient is zero, which only decays the weights."""
    run = new_run()
    masked = torch.full((4,), -100)
    before = everything(run)
    with run.step() as step:
        step.backward(nn.functional.cross_entropy(run.model(X).expand(4, 2), masked))
    assert step.result is not None and "micro-batch 1 of 1 is nan" in str(step.result.skipped)
    assert same(everything(run), before)


def test_a_loss_scale_falls_and_recovers() -> None:
    run = new_run("fp16-mixed")
    assert run.scale == 2.0**16
    result = take(run, NAN)
    assert result is not None and result.scale == 2.0**16 and run.scale == 2.0**15
    assert "the loss scale fell from 65536 to 32768" in str(result.skipped)


def test_an_overflow_of_the_scaled_gradient_is_not_the_datas_fault() -> None:
    run = new_run("fp16-mixed")
    assert run.scaler is not None
    run.scaler.scale = 2.0**40
    before = everything(run)
    result = take(run, X)
    assert result is not None and math.isfinite(result.loss)
    assert "the gradient of" in str(result.skipped) and same(everything(run), before)
    skipped = 1
    while (result := take(run, X)) is not None and result.skipped is not None:
        skipped += 1
    assert skipped < 40 and run.counters.updates == 1


def test_gradients_do_not_depend_on_the_scale() -> None:
    norms = []
    for scale in (1.0, 2.0**10):
        run = new_run("fp16-mixed")
        assert run.scaler is not None
        run.scaler.scale = scale
        result = take(run, X)
        assert result is not None and result.grad_norm is not None
        norms.append(result.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_144_bad_steps_and_a_good_one() -> None:
    """torch's scale falls below the smallest fp32 number, and the first good step makes every weight NaN."""
    run = new_run("fp16-mixed")
    for _ in range(166):
        take(run, NAN)
    assert run.scale == 1.0
    result = take(run, X)
    assert result is not None and result.skipped is None
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for x in (*[NAN] * 166, X):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not any(bool(parameter.isfinite().any()) for parameter in model.parameters())


def test_a_run_that_only_skips_is_over() -> None:
    run = new_run(patience=3)
    take(run, NAN)
    take(run, NAN)
    with pytest.raises(TrainingError, match=r"3 steps in a row were skipped.*micro-batch 1 of 1 is nan"):
        take(run, NAN)


def test_micro_batches_are_a_mean(make_tiny_model: Callable[..., Any]) -> None:
    """Three micro-batches and one batch of all three: the same gradient, up to the order of sums."""
    norms = []
    for accumulate, micro_batches in ((1, [torch.cat([X, 2 * X, 3 * X])]), (3, [X, 2 * X, 3 * X])):
        run = new_run("fp32", accumulate=accumulate)
        result = take(run, *micro_batches)
        assert result is not None and result.grad_norm is not None
        norms.append((result.loss, result.grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_one_block_a_micro_batch() -> None:
    run = new_run(accumulate=2)
    assert take(run, X) is None and run.pending == 1 and run.counters.steps == 0
    result = take(run, X)
    assert result is not None and run.pending == 0 and run.counters.updates == 1
    assert run.last is result


def test_too_many_micro_batches() -> None:
    run = new_run()
    with pytest.raises(TrainingError, match="pass accumulate=2"), run.step() as step:
        step.backward(loss_of(run))
        step.backward(loss_of(run))
    assert run.pending == 0


def test_a_backward_pass_outside_its_block() -> None:
    run = new_run()
    step = run.step()
    with pytest.raises(TrainingError, match=r"backward was called outside its block; .*inside `with run\.step\(\)"):
        step.backward(loss_of(run))
    with step:
        step.backward(loss_of(run))
    for call in (lambda: step.backward(loss_of(run)), step.settle):
        with pytest.raises(TrainingError, match="outside its block"):
            call()
    assert run.counters.updates == 1 and run.counters.micro_batches == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_entered_again(accumulate: int) -> None:
    run = new_run(accumulate=accumulate)
    with run.step() as step:
        step.backward(loss_of(run))
    with pytest.raises(TrainingError, match=r"a step was entered again.*call run\.step\(\)"), step:
        pass
    assert run.pending == accumulate - 1
    take(run, X)
    assert run.counters.updates == 3 - accumulate


def test_a_block_without_a_backward_pass() -> None:
    run = new_run()
    with pytest.raises(TrainingError, match=r"not loss\.backward"), run.step():
        loss_of(run).backward()


def test_blocks_do_not_nest() -> None:
    run = new_run()
    with pytest.raises(TrainingError, match="inside another"), run.step(), run.step():
        pass
    assert take(run, X) is not None


def test_an_error_inside_drops_the_step() -> None:
    run = new_run(accumulate=2)
    before = everything(run)
    with pytest.raises(KeyError), run.step() as step:
        step.backward(loss_of(run))
        raise KeyError("a batch")
    assert not torch.is_autocast_enabled("cpu")
    assert run.pending == 0 and same(everything(run), before)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert take(run, X, X) is not None


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (None, "pass labels"),
        (torch.ones(3, requires_grad=True), "take its mean"),
        (torch.ones(()), "does not depend on anything that is trained"),
        (torch.ones((), dtype=torch.int64), "take its mean"),
    ],
)
def test_what_is_no_loss(loss: Any, says: str) -> None:
    run = new_run()
    with pytest.raises(TrainingError, match=says), run.step() as step:
        step.backward(loss)


def test_a_loss_in_fp16_is_scaled_in_fp32() -> None:
    run = new_run("fp16-mixed")
    assert run.scaler is not None
    run.scaler.scale = 2.0**15  # fp16 holds it, and not four times as much
    with run.step() as step:
        loss = (run.model(X).float().square().mean() + 4).half()
        step.backward(loss)
    assert step.result is not None and step.result.skipped is None


def test_clipping_is_of_the_unscaled_gradient() -> None:
    for policy in ("fp32", "fp16-mixed"):
        lengths: list[float] = []
        run = new_run(policy, max_grad_norm=1e-3)
        object.__setattr__(
            run.settings, "monitor", lambda result, run=run, lengths=lengths: lengths.append(length_of(run))
        )
        result = take(run, X)
        assert result is not None and result.grad_norm is not None and result.grad_norm > 1e-2
        assert lengths[0] == pytest.approx(1e-3, rel=1e-2)
        assert run.counters.clipped == 1


def length_of(run: TrainingRun) -> float:
    return float(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]).norm())


def test_state_goes_on_where_it_stopped() -> None:
    run = new_run("fp16-mixed")
    take(run, NAN)
    take(run, X)
    state = copy.deepcopy(run.state_dict())
    other = new_run("fp16-mixed")
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    other.load_state_dict(state)
    assert other.scale == run.scale and other.counters == run.counters and rate(other) == rate(run)
    assert take(other, X) == take(run, X)
    assert same(everything(run), everything(other))


def test_no_state_in_the_middle_of_a_step() -> None:
    run = new_run(accumulate=2)
    take(run, X)
    with pytest.raises(TrainingError, match="1 of 2 micro-batches"):
        run.state_dict()


def test_a_state_of_another_policy_is_refused() -> None:
    state = new_run("fp16-mixed").state_dict()
    with pytest.raises(TrainingError, match="loss_scale"):
        new_run("bf16-mixed").load_state_dict(state)


def test_closing_leaves_a_plain_model() -> None:
    run = new_run("fp8-hybrid")
    take(run, X)
    run.close()
    assert not any("forward" in vars(module) for module in run.model.modules())


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp8-hybrid", "bf16-pure-sr"])
def test_closing_in_the_middle_of_a_step_drops_it_and_says_so(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(policy, accumulate=3)
    take(run, X, X, X)
    assert take(run, X) is None and run.pending == 1
    before = everything(run)
    run.close()
    assert run.pending == 0 and same(everything(run), before)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert "closed with 1 micro-batch of an unfinished step" in caplog.text and "accumulate=3" in caplog.text
    caplog.clear()
    run.close()
    assert not caplog.text


def test_shares_of_an_unfinished_step_are_dropped_too(caplog: pytest.LogCaptureFixture) -> None:
    """What a library's loop has handed over when it is stopped."""
    run = new_run("fp16-mixed")
    driver = LoopDriver(run)
    for _ in range(2):
        with driver.forward():
            loss = loss_of(run) / 3
        driver.backward(loss, is_last=False)
    run.close()
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert "closed with 2 micro-batches of an unfinished step" in caplog.text


def test_closing_between_steps_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run = new_run(accumulate=2)
    take(run, X, X)
    run.close()
    assert not caplog.text


def test_a_policy_without_its_loss_scale_can_be_had() -> None:
    """What the 3 a.m. run was."""
    run = new_run(replace(POLICIES["fp16-mixed"], name="fp16 unscaled", loss_scale=None))
    assert run.scale is None
    assert take(run, X) is not None
