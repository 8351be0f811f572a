"""Adapters on a frozen base: what is trained, what it computes, what it takes; against peft and plain products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import ModelError, TrainingError, UnknownName
from bitwright.hardware.memory import adapter_parameters
from bitwright.inference.packed.modules import PackedLinear
from bitwright.models.quiet import quiet_transformers
from bitwright.models.shape import model_shape
from bitwright.quantize import SCHEMES, quantize
from bitwright.training.lora import LoraSettings, add_lora, lora_sizes

TOKENS = torch.arange(40).reshape(2, 20)


def in_bf16(model: nn.Module) -> nn.Module:
    """Parameters in bf16; `model.bfloat16()` would also cast the frequencies of rotary embeddings."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def losses_of(run: Any, model: Any) -> list[float]:
    """Six steps on the same tokens."""
    losses = []
    for _ in range(6):
        with run.step() as step:
            step.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        assert run.last is not None
        losses.append(run.last.loss)
    return losses


@pytest.mark.parametrize("base", ["fp32", "bf16", "int4_g32", "fp8_w"])
def test_only_adapters_are_trained(make_tiny_model: Callable[..., Any], base: str) -> None:
    model = add_lora(make_tiny_model("llama"), rank=4, base=base)
    names = trained_names(model)
    assert names and all("lora_" in name for name in names)
    assert all(model.get_parameter(name).dtype == torch.float32 for name in names)
    out = model(TOKENS, labels=TOKENS)
    out.loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in names)
    assert all(p.grad is None for n, p in model.named_parameters() if n not in names)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3"])
def test_adapters_are_counted_in_closed_form(make_tiny_model: Callable[..., Any], architecture: str) -> None:
    plain = make_tiny_model(architecture)
    expected = 0
    for module in plain.modules():
        weight = module._parameters.get("weight")
        is_decoder = weight is not None and weight.dim() == 2 and weight.shape[0] != 260 and weight.shape[0] != 512
        if is_decoder and not isinstance(module, nn.Embedding):
            expected += 5 * sum(weight.shape)
    model = add_lora(plain, rank=5)
    assert lora_sizes(model).adapter_parameters == expected
    if architecture == "llama":
        assert adapter_parameters(model_shape(make_tiny_model("llama"), name="tiny"), 5) == expected


def test_new_adapters_change_nothing(make_tiny_model: Callable[..., Any]) -> None:
    with torch.no_grad():
        plain = in_bf16(make_tiny_model("llama"))(TOKENS).logits
        adapted = add_lora(make_tiny_model("llama"), rank=4)(TOKENS).logits
    assert torch.equal(plain, adapted)


def test_a_base_in_codes_computes_with_their_values(make_tiny_model: Callable[..., Any]) -> None:
    scheme = SCHEMES["int4_g32"].weights
    assert scheme is not None
    plain = make_tiny_model("llama")
    weight = plain.model.layers[0].mlp.down_proj.weight.detach().clone()
    model = add_lora(plain, rank=4, base="int4_g32")
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")
    assert isinstance(layer, PackedLinear)
    values = quantize(weight, scheme).dequantize()
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    y = layer(x)
    exact = x.detach().float() @ values.t()
    assert torch.allclose(y.float(), exact, atol=2**-8 * float(exact.abs().max()))
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(g)
    assert x.grad is not None
    dx = g.float() @ values
    assert torch.allclose(x.grad.float(), dx, atol=2**-8 * float(dx.abs().max()))


def test_codes_take_fewer_bytes(make_tiny_model: Callable[..., Any]) -> None:
    sizes = {base: lora_sizes(add_lora(make_tiny_model("llama"), rank=2, base=base)) for base in ("bf16", "int4_g32")}
    shape = model_shape(make_tiny_model("llama"), name="tiny")
    others = 2 * (shape.num_parameters - shape.linear_weights)
    assert sizes["bf16"].base_bytes == others + 2 * shape.linear_weights
    # 4.5 bits a weight, and what a layout fills small matrices up with
    assert 4.5 <= 8 * (sizes["int4_g32"].base_bytes - others) / shape.linear_weights < 6
    assert sizes["int4_g32"].packed_matrices == 14


def test_training_lowers_the_loss_on_codes(make_tiny_model: Callable[..., Any]) -> None:
    model = add_lora(make_tiny_model("llama"), rank=8, base="int4_g32")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("bf16-mixed", {"base": "bf16"}),
        ("bf16-mixed", {"base": "int4_g32"}),
        ("bf16-mixed", {"base": "fp8_w"}),
        ("bf16-pure-sr", {"base": "bf16", "adapters": "bf16"}),
        ("fp32", {"base": "fp32"}),
    ],
)
def test_prepare_trains_them(make_tiny_model: Callable[..., Any], policy: str, fields: dict[str, str]) -> None:
    from bitwright.training.prepare import prepare

    model = add_lora(make_tiny_model("llama"), rank=4, **fields).train()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    run = prepare(model, torch.optim.AdamW(trained, lr=1e-2), policy=policy, max_grad_norm=1.0)
    losses = losses_of(run, model)
    assert run.counters.skipped == 0 and losses[-1] < losses[0]
    assert all(torch.equal(model.get_parameter(name), p) for name, p in frozen.items())
    assert all(not torch.equal(p, old) for p, old in zip(trained, before, strict=True))


@pytest.mark.parametrize("base", ["int4_g32", "fp8_w"])
@pytest.mark.parametrize("policy", ["fp16-mixed", "fp8-hybrid", "fp8-block", "mxfp8", "nvfp4"])
def test_every_policy_of_fewer_bits_trains_on_codes(
    make_tiny_model: Callable[..., Any], policy: str, base: str
) -> None:
    from bitwright.training.prepare import prepare

    model = add_lora(make_tiny_model("llama"), rank=4, base=base).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    run = prepare(model, torch.optim.AdamW(trained, lr=1e-2), policy=policy)
    losses = losses_of(run, model)
    assert run.counters.skipped == 0 and losses[-1] < losses[0] < 10
    assert all(not torch.equal(p, old) for p, old in zip(trained, before, strict=True))


def test_layers_in_codes_are_passed_over_and_told(make_tiny_model: Callable[..., Any]) -> None:
    """They have a product of their own; what is beside them multiplies as on a base in bf16."""
    from bitwright.training.policy import POLICIES
    from bitwright.training.prepare import prepare
    from bitwright.training.products.sites import product_sites

    model = add_lora(make_tiny_model("llama"), rank=4, base="int4_g32").train()
    plain = product_sites(add_lora(make_tiny_model("llama"), rank=4), POLICIES["fp8-hybrid"])
    sites = product_sites(model, POLICIES["fp8-hybrid"])
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == 14 and packed == set(plain.low) - set(sites.low)
    assert {name: sites.high[name] for name in plain.high} == plain.high
    assert all("packed codes" in sites.high[name] for name in packed)
    run = prepare(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), policy="fp8-hybrid")
    assert run.products is not None
    assert any(line.startswith("14 linear layers in bf16: packed codes") for line in run.products.say("bf16"))
    run.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int4_g32", "fp8_w", "nf4_g64"])
def test_autocast_has_products_with_codes_in_its_dtype(
    make_tiny_model: Callable[..., Any], scheme: str, dtype: torch.dtype
) -> None:
    """As it has those of torch's linear layers; in fp16 nothing is rounded to bf16 on the way."""
    model = add_lora(make_tiny_model("llama"), rank=4, base=scheme)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.down_proj.base_layer")
    weight = layer.packed.values()  # type: ignore[union-attr,operator]
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype):
        y = layer(x)
    exact = x.detach().float() @ weight.t()
    step = torch.finfo(dtype).eps
    assert y.dtype == dtype and torch.allclose(y.float(), exact, rtol=step, atol=step * float(exact.abs().max()))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert layer(x).dtype == torch.bfloat16 and layer(x.float()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_optimizer_may_hold_the_frozen_base_too(make_tiny_model: Callable[..., Any], dtype: torch.dtype) -> None:
    from bitwright.training.prepare import prepare

    base = "bf16" if dtype == torch.bfloat16 else "fp16"
    runs = []
    for holds_all in (False, True):
        model = add_lora(make_tiny_model("llama"), rank=4, base=base).train()
        held = [p for p in model.parameters() if holds_all or p.requires_grad]
        torch.manual_seed(0)
        with torch.no_grad():
            for name in trained_names(model):
                model.get_parameter(name).normal_(std=0.05)
        run = prepare(model, torch.optim.AdamW(held, lr=1e-2), policy="bf16-mixed", max_grad_norm=1.0)
        for _ in range(3):
            with run.step() as step:
                step.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        runs.append(run)
    few, all_ = runs
    assert few.last == all_.last and len(all_.optimizer.state) == len(few.optimizer.state)
    assert all(torch.equal(a, b) for a, b in zip(few.model.parameters(), all_.model.parameters(), strict=True))


def test_adapters_in_bf16(make_tiny_model: Callable[..., Any]) -> None:
    model = add_lora(make_tiny_model("llama"), rank=4, adapters="bf16")
    assert {model.get_parameter(name).dtype for name in trained_names(model)} == {torch.bfloat16}
    F.cross_entropy(model(TOKENS).logits.flatten(0, 1).float(), TOKENS.flatten()).backward()


def test_adapters_are_saved_and_loaded_by_peft(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    from peft import PeftModel

    model = add_lora(make_tiny_model("llama"), rank=4)
    with torch.no_grad():
        for name in trained_names(model):
            model.get_parameter(name).normal_(std=0.05)
        expected = model(TOKENS).logits
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with quiet_transformers():
        again = PeftModel.from_pretrained(in_bf16(make_tiny_model("llama")), tmp_path, autocast_adapter_dtype=True)
    assert torch.equal(again(TOKENS).logits, expected)


def test_adapters_on_adapters_are_refused(make_tiny_model: Callable[..., Any]) -> None:
    base = make_tiny_model("llama")
    model = add_lora(base, rank=4)
    for again in (model, base):
        before = trained_names(again)
        with pytest.raises(TrainingError, match="has adapters already"):
            add_lora(again, rank=4)
        assert trained_names(again) == before
    merged = model.merge_and_unload()
    assert trained_names(add_lora(merged, rank=4))
    with pytest.raises(TrainingError, match=r"model is None"):
        add_lora(None)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("llama")
    with pytest.raises(TrainingError, match="rank 0"):
        LoraSettings(rank=0)
    for rank in ("4", 4.0, True, None):
        with pytest.raises(TrainingError, match=rf"rank {rank!r}; .*whole number"):
            LoraSettings(rank=rank)  # type: ignore[arg-type]
    for alpha in (-1, 0, float("nan"), float("inf"), "8", True):
        with pytest.raises(TrainingError, match=rf"alpha is {alpha!r}; .*positive number, or None"):
            LoraSettings(alpha=alpha)  # type: ignore[arg-type]
    for dropout in ("0.1", None, float("nan"), -0.1, True):
        with pytest.raises(TrainingError, match=rf"dropout of {dropout!r} .*0 up to below 1"):
            LoraSettings(dropout=dropout)  # type: ignore[arg-type]
    for base in (None, ["bf16"]):
        with pytest.raises(TrainingError, match=r"base is .*name of a scheme"):
            LoraSettings(base=base)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"adapters in \['fp32'\]"):
        LoraSettings(adapters=["fp32"])  # type: ignore[arg-type]
    assert LoraSettings(rank=1, alpha=0.5).alpha == 0.5
    with pytest.raises(TrainingError, match="adapters in 'fp16'"):
        add_lora(model, adapters="fp16")
    with pytest.raises(TrainingError, match="dropout of 1"):
        add_lora(model, dropout=1.0)
    with pytest.raises(TrainingError, match="round activations too"):
        add_lora(model, base="fp8")
    with pytest.raises(UnknownName, match="int4_g32"):
        add_lora(model, base="int4_g3")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    with pytest.raises(ModelError, match="packed codes already"):
        adapted = add_lora(model, rank=2, base="int4_g32")
        add_lora(adapted.get_base_model(), rank=2)  # type: ignore[operator]
