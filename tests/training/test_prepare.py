"""What prepare refuses, in which words, and that it has changed nothing then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bitwright import hardware
from bitwright.errors import TrainingError, UnknownName
from bitwright.training.policy import POLICIES, policy_named
from bitwright.training.prepare import find_policy, prepare
from bitwright.training.product_recipe import Delay
from bitwright.training.recipes import fp8_hybrid


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, **changes: Any) -> str:
    """The message of an error; the model is as it was."""
    before = {name: (p.dtype, id(p), p.data_ptr()) for name, p in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises((TrainingError, UnknownName)) as error:
        prepare(model, optimizer, **{"policy": "bf16-mixed", **changes})
    assert {name: (p.dtype, id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    return str(error.value)


def test_an_unknown_policy_names_the_nearest() -> None:
    model = small()
    assert "did you mean 'bf16-mixed'" in refused(model, sgd(model), policy="bf16-mixde")


def test_an_unknown_device_names_the_nearest() -> None:
    model = small()
    assert "did you mean 'h100" in refused(model, sgd(model), device="h1000")


def test_a_device_that_cannot_says_what_can() -> None:
    model = small()
    message = refused(model, sgd(model), device="v100-sxm2")
    assert "no matrix unit for bf16" in message and "use 'fp16-mixed'" in message
    message = refused(model, sgd(model), policy="fp8-hybrid", device="a100-sxm")
    assert "use 'bf16-mixed'" in message and "emulate=True" in message


def test_it_runs_all_the_same_when_it_is_asked_to() -> None:
    model = small()
    run = prepare(model, sgd(model), policy="bf16-mixed", device="v100-sxm2", emulate=True)
    assert any("emulated: v100-sxm2 has no matrix unit for bf16" in note for note in run.notes)


def test_a_processor_emulates_unless_it_must_not() -> None:
    model = small()
    run = prepare(model, sgd(model), policy="fp8-hybrid", device="x86-amx")
    assert any("emulated" in note for note in run.notes)
    run.close()
    assert "no matrix unit" in refused(model, sgd(model), policy="fp8-hybrid", device="x86-amx", emulate=False)


@pytest.mark.parametrize(("device", "policy"), [("x86-amx", "bf16-mixed"), ("x86-avx2", "fp32")])
def test_auto_gives_its_reason(device: str, policy: str) -> None:
    model = small()
    run = prepare(model, sgd(model), policy="auto", device=device)
    assert run.policy is POLICIES[policy]
    assert device in run.reason and policy in run.describe()


def test_a_policy_may_be_a_record_or_an_alias() -> None:
    model = small()
    assert prepare(model, sgd(model), policy=POLICIES["fp32"]).policy.name == "fp32"
    assert find_policy("mixed_bfloat16", torch.device("cpu")).policy.name == "bf16-mixed"


@pytest.mark.parametrize("delay", [None, Delay(history=2, margin=1)])
def test_a_policy_may_have_another_recipe(delay: Delay | None) -> None:
    """Current scaling, or other delays: as the documentation spells it."""
    model = small()
    policy = replace(policy_named("fp8-hybrid"), products=fp8_hybrid(delay))
    run = prepare(model, sgd(model), policy=policy)
    for _ in range(3):
        with run.step() as step:
            step.backward(model(torch.ones(1, 32)).float().sum())
    assert run.products is not None
    histories = [kind["history"] for kind in run.products.state_dict()["0"]["delayed"].values()]
    assert [len(history) for history in histories] == ([] if delay is None else [2, 2])


@pytest.mark.parametrize(("dtype", "word"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp8-hybrid", "fp32"])
def test_parameters_that_are_no_masters(dtype: torch.dtype, word: str, policy: str) -> None:
    model = small().to(dtype)
    message = refused(model, sgd(model), policy=policy)
    assert f"0.weight is in {word}" in message and "dtype=torch.float32" in message and "masters" in message


def test_fp16_parameters_under_a_bf16_policy() -> None:
    model = small().half()
    assert "0.weight is in fp16" in refused(model, sgd(model), policy="bf16-pure-sr")


def test_a_frozen_base_may_be_anything() -> None:
    model = small()
    model[0].requires_grad_(False).half()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run = prepare(model, torch.optim.SGD(trained, lr=0.1), policy="bf16-mixed")
    assert model[0].weight.dtype == torch.float16
    run.close()


def test_an_optimizer_of_another_model() -> None:
    model = small()
    message = refused(model, sgd(small()))
    assert "holds 6 of 6 parameters that are not the model's" in message and "model.parameters()" in message


def test_an_optimizer_made_before_the_model_was_cast() -> None:
    model = small().double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 32).double()).sum().backward()
    optimizer.step()
    model.float()
    optimizer.zero_grad()
    message = refused(model, optimizer)
    assert "exp_avg of 0.weight" in message and "cast first, then make the optimizer" in message


def test_an_optimizer_made_before_parameters_were_replaced() -> None:
    """What a cast does to parameters where torch is told to make new ones."""
    model = small()
    optimizer = sgd(model)
    for module in (model[0], model[2]):
        module.weight = nn.Parameter(module.weight.detach().clone())
    assert "holds 2 of 6 parameters that are not the model's" in refused(model, optimizer)


def test_an_eps_that_is_zero() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-60)
    assert "eps=1e-60 is 0 in fp32" in refused(model, optimizer, policy="bf16-pure-sr")


def test_layers_that_somebody_has_taken() -> None:
    """Refused by the last thing that is installed: what was installed before is taken back, and nothing is cast."""
    model = small()
    model[2].forward = model[2].forward
    assert "'2' has a forward of its own already" in refused(model, sgd(model), policy="fp8-hybrid")


def test_positions_that_cannot_be_mended() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(4, dtype=torch.bfloat16), persistent=False)

    model = nn.Sequential(nn.Linear(4, 4), Rotary())
    assert "1.inv_freq is in bfloat16" in refused(model, sgd(model), policy="bf16-pure")


def test_nothing_to_train() -> None:
    model = small().requires_grad_(False)
    assert "unfreeze some" in refused(model, sgd(model))


def test_no_values() -> None:
    with torch.device("meta"):
        model = small()
    assert "meta device" in refused(model, sgd(model))


def test_an_optimizer_that_cannot_work_in_pieces() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    optimizer = torch.optim.Adafactor(model.parameters())
    assert "Adafactor" in refused(model, optimizer, policy="bf16-pure-sr")
    prepare(model, optimizer, policy="bf16-mixed").close()


@pytest.mark.parametrize(
    "changes", [{"accumulate": 0}, {"max_grad_norm": 0.0}, {"max_grad_norm": -1.0}, {"patience": 0}]
)
def test_impossible_settings(changes: dict[str, float]) -> None:
    model = small()
    assert next(iter(changes)) in refused(model, sgd(model), **changes)


def test_parameters_that_nobody_updates_are_told() -> None:
    model = small()
    run = prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1), policy="fp32")
    assert any("4 trained parameters are in no group of the optimizer" in note for note in run.notes)


def test_gradients_of_before_are_dropped() -> None:
    model = small()
    model(torch.ones(1, 32)).sum().backward()
    prepare(model, sgd(model), policy="fp32")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_preparing_twice_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    run = prepare(model, sgd(model), policy="bf16-mixed")
    with pytest.raises(TrainingError, match=r"run\.close\(\)"):
        prepare(model, sgd(model), policy="bf16-mixed")
    run.close()
    prepare(model, sgd(model), policy="bf16-mixed").close()


def test_cast_tables_are_mended_and_told(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama").requires_grad_(True)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    run = prepare(model, sgd(model), policy="bf16-pure-sr")
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert any("computed anew" in note for note in run.notes)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_takes_a_step_and_describes_itself(make_tiny_model: Callable[..., Any], name: str) -> None:
    model = make_tiny_model("llama").requires_grad_(True).train()
    keys = set(model.state_dict())
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=name, max_grad_norm=1.0)
    ids = torch.arange(64).reshape(2, 32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = None
    for _ in range(3):
        with run.step() as step:
            step.backward(model(input_ids=ids, labels=ids).loss)
        assert step.result is not None and step.result.skipped is None
        first = first or step.result.loss
    assert run.last is not None and run.last.loss < first  # type: ignore[operator]
    assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert set(model.state_dict()) == keys
    text = run.describe()
    assert name in text and "bytes" in text
    run.close()


def test_device_records_are_taken_as_they_are() -> None:
    model = small()
    assert prepare(model, sgd(model), device=hardware.get("x86-amx")).policy.name == "bf16-mixed"
