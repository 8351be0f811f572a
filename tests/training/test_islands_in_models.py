"""Whole models under both autocasts: the kernels that add up, normalise, decide and compare get fp32 numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from cuda_autocast import CudaAutocast
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitwright.training.forward.islands import Islands
from bitwright.training.forward.named_islands import install
from bitwright.training.policy import POLICIES
from bitwright.training.prepare import prepare

#: Kernels that are fp32's in fp16: softmax and norms by their statistics, losses, powers and roots.
ISLAND_KERNELS = {
    "_softmax",
    "_log_softmax",
    "native_layer_norm",
    "nll_loss_forward",
    "pow",
    "rsqrt",
    "mean",
    "sum",
    "logsumexp",
    "sin",
    "cos",
}


class Watch(TorchDispatchMode):
    """Which dtypes the floating inputs of kernels have, by the kernel's name."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        found = {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        self.inputs[func.overloadpacket.__name__] |= found
        return func(*args, **(kwargs or {}))


def kernels_of(model: nn.Module, dtype: torch.dtype, compute: str, semantics: str) -> dict[str, set[torch.dtype]]:
    """Kernel → dtypes of its floating inputs in one forward pass with labels."""
    ids = torch.arange(48).reshape(2, 24) % 256
    with ExitStack() as stack:
        watch = Watch()
        stack.enter_context(torch.autocast("cpu", dtype))
        stack.enter_context(Islands(compute, "cpu", semantics=semantics))
        if semantics == "cuda":
            stack.enter_context(CudaAutocast(dtype))
        stack.enter_context(watch)
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.dtype == torch.float32 and bool(loss.isfinite())
    return watch.inputs


@pytest.mark.parametrize("semantics", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral"])
def test_islands_of_a_model_in_fp16(make_tiny_model: Callable[..., Any], architecture: str, semantics: str) -> None:
    model = make_tiny_model(architecture).train()
    model.set_attn_implementation("eager")
    installed = install(model)
    seen = kernels_of(model, torch.float16, "fp16", semantics)
    installed.remove()
    found = ISLAND_KERNELS & set(seen)
    assert {"_softmax", "_log_softmax", "nll_loss_forward"} <= found
    assert {name: seen[name] for name in found} == {name: {torch.float32} for name in found}
    # and the products are where the time is saved
    assert torch.float16 in seen["mm"] | seen["addmm"] | seen["bmm"]


def test_without_islands_the_cpu_has_none(make_tiny_model: Callable[..., Any]) -> None:
    """What there is to guard against: powers in GPT-2's activation run in fp16 under torch's CPU autocast."""
    model = make_tiny_model("gpt2").train()
    model.set_attn_implementation("eager")
    with torch.autocast("cpu", torch.float16), Watch() as watch:
        model(torch.arange(48).reshape(2, 24) % 256)
    assert torch.float16 in watch.inputs["pow"]


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed", "bf16-pure-sr", "fp8-hybrid"])
def test_the_router_of_a_run_decides_in_fp32(make_tiny_model: Callable[..., Any], policy: str) -> None:
    model = make_tiny_model("mixtral").requires_grad_(True).train()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=policy)
    logits: list[torch.dtype] = []
    router = model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, inputs, output: logits.extend(t.dtype for t in output[:2]))
    ids = torch.arange(48).reshape(2, 24) % 256
    with run.step() as step:
        step.backward(model(input_ids=ids, labels=ids).loss)
    assert step.result is not None and step.result.skipped is None
    assert logits and set(logits) <= {torch.float32, torch.int64}
    assert router.weight.dtype == torch.float32
    run.close()


def test_checkpointed_activations_change_nothing(make_tiny_model: Callable[..., Any]) -> None:
    losses = []
    for checkpointed in (False, True):
        model = make_tiny_model("llama").requires_grad_(True).train()
        if checkpointed:
            model.activation_checkpointing_enable()
        run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy="fp16-mixed")
        ids = torch.arange(48).reshape(2, 24) % 256
        for _ in range(3):
            with run.step() as step:
                step.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            assert step.result is not None
            losses.append((step.result.loss, step.result.grad_norm, step.result.skipped))
        run.close()
    assert losses[:3] == losses[3:]


def test_every_16_bit_policy_says_what_its_islands_are(make_tiny_model: Callable[..., Any]) -> None:
    model = make_tiny_model("mixtral").requires_grad_(True)
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy="bf16-mixed")
    assert "2 × router" in run.describe() and "1 × positions" in run.describe()
    assert run.policy is POLICIES["bf16-mixed"]
    run.close()
