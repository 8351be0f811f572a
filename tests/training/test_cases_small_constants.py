"""Small constants that vanish (eps, 1 − β, the divisor of a clip): the kind, over sizes and formats.

An eps of 1e−8 is 0 in fp16, so that Adam on fp16 parameters divides 0 by 0 at the first element without a gradient.
Here eps meets numbers in fp32 only, whatever parameters and moments are stored in.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.gradients import clip, unscale_and_check
from bitwright.training.optimizer.stand_ins import Update
from bitwright.training.optimizer.update import UPDATES


def test_torch_in_fp16_is_nan_after_a_step() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.tensor([0.0, 1e-4, 1.0], dtype=torch.float16)
    torch.optim.AdamW([weight], lr=1e-3, eps=1e-8, foreach=False).step()
    assert weight.isnan().any() or weight.isinf().any()


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-4])
@pytest.mark.parametrize("size", [0.0, 1e-18, 1e-9, 1e-4, 1.0, 1e4])
@pytest.mark.parametrize(("rule", "moments"), [("stochastic", "fp16"), ("kahan", "bf16"), ("nearest", "bf16")])
def test_eps_holds_in_every_format(rule: str, moments: str, size: float, eps: float) -> None:
    gradients = torch.tensor([0.0, 1.0, -1.0, 1e-3, -0.3, 0.0]) * size
    narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    wide = nn.Parameter(torch.ones(6))
    narrow.grad_dtype = torch.float32
    update = Update(torch.optim.AdamW([narrow], lr=0.1, eps=eps), UPDATES[rule], moments=moments)
    plain = torch.optim.AdamW([wide], lr=0.1, eps=eps)
    for _ in range(5):
        narrow.grad, wide.grad = gradients.clone(), gradients.clone()
        update.step(), plain.step()
    assert narrow.isfinite().all()
    # no weight moves further than in fp32, but for a rounding a step
    assert ((narrow.float() - 1).abs() <= (wide - 1).abs() * 1.02 + 5 * 2.0**-7).all()


@pytest.mark.parametrize("beta", [0.99, 0.999, 0.9999])
def test_one_minus_beta_does_not_vanish(beta: float) -> None:
    """bf16(0.999) is 1: an average that is weighted in bf16 never takes anything in."""
    assert float(torch.tensor(0.999).bfloat16()) == 1.0
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    update = Update(torch.optim.AdamW([weight], betas=(0.9, beta)), UPDATES["stochastic"])
    weight.grad = torch.full_like(weight, 0.5)
    update.step()
    assert update.optimizer.state[weight]["exp_avg_sq"].tolist() == pytest.approx([0.25 * (1 - beta)] * 4, rel=1e-5)


@pytest.mark.parametrize("setting", [{"lr": torch.tensor(1e-3).bfloat16()}, {"lr": torch.tensor(1e-3).half()}])
def test_settings_in_narrow_tensors_are_refused(setting: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(TrainingError, match=r"lr is a tensor of .*give a number"):
        Update(torch.optim.SGD([weight], **setting), UPDATES["kahan"])


@pytest.mark.parametrize("eps", [1e-46, 1e-60, (1e-60, 1e-3)])
def test_an_eps_that_fp32_does_not_hold_is_refused(eps: Any) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
    optimizer.param_groups[0]["eps"] = eps
    with pytest.raises(TrainingError, match="is 0 in fp32"):
        Update(optimizer, UPDATES["fp32"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-20, 1e-7])
def test_gradients_without_length_are_not_divided_into_nan(dtype: torch.dtype, size: float) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad = torch.full_like(weight, size)
    before = weight.grad.clone()
    named = [("weight", weight)]
    assert clip(named, 1.0, unscale_and_check(named)) == 1.0 and torch.equal(weight.grad, before)
