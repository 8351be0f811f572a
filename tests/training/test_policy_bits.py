"""Bits of policies against what prepared models keep on the CPU, counted storage by storage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, UntypedStorage
from transformers import LlamaConfig, LlamaForCausalLM

from bitwright.errors import TrainingError, UnknownName
from bitwright.hardware.memory.training_activations import end_bits, layer_bits
from bitwright.models.shape import model_shape
from bitwright.training.lora import add_lora, lora_sizes
from bitwright.training.policy import POLICIES
from bitwright.training.policy_bits import activation_setup, adapters_on, base_bits, state_bits
from bitwright.training.prepare import prepare

TOKENS = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


@pytest.mark.parametrize(
    "name", ["fp32", "bf16-mixed", "bf16-pure", "bf16-pure-sr", "bf16-pure-kahan", "fp8-hybrid", "mxfp8"]
)
def test_states_are_what_a_prepared_run_keeps(name: str) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = prepare(model, optimizer, policy=name, emulate=True)
    seen: dict[str, int] = {}
    with run.step() as step:
        step.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        seen["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    shape = model_shape(llama(), name="tiny")
    bits = state_bits(POLICIES[name])
    numbers = shape.num_parameters
    # norms stay fp32, and are a thousandth of the parameters
    assert sum(p.nbytes for p in model.parameters()) == pytest.approx(numbers * bits.parameters / 8, rel=0.005)
    assert seen["gradients"] == pytest.approx(numbers * bits.gradients / 8, rel=0.005)
    kept = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    assert kept == pytest.approx(numbers * (bits.moments + bits.compensation) / 8, rel=0.01)


@pytest.mark.parametrize("name", ["bf16-mixed", "bf16-pure-sr", "fp8-hybrid", "fp8-block", "mxfp8", "nvfp4"])
def test_activations_are_what_a_prepared_run_keeps(name: str) -> None:
    model = llama()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=name, emulate=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with run.step() as step:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        measured = sum(storage.nbytes() for storage in kept.values())
        step.backward(loss)
    policy, shape = POLICIES[name], model_shape(llama(), name="tiny")
    changes: dict[str, Any] = {}
    apart = 0
    if activation_setup(policy, batch=2, sequence=256).input_bits is not None:
        # emulated codes lie in bf16, beside the output of attention that they were made of
        changes["input_bits"], apart = 16.0, TOKENS.numel() * 3 * 128 * 2
    setup = activation_setup(policy, batch=2, sequence=256, **changes)
    if policy.last_layers_high:  # one of three layers, under autocast
        apart += 2 * shape.linear_weights // 3
    states = state_bits(policy)
    copies = (shape.linear_weights * states.copies + shape.read_by_head * states.head_copies) / 8
    predicted = TOKENS.numel() * (3 * layer_bits(shape, setup) + end_bits(shape, setup)) / 8 + copies
    predicted += TOKENS.numel() * 512 * 4 + apart  # log-softmax
    assert measured == pytest.approx(predicted, rel=0.02)


def test_masters_in_the_optimizer_are_as_large() -> None:
    policy = POLICIES["bf16-mixed"]
    assert state_bits(policy).bytes_per_parameter == 16
    apart = state_bits(policy, masters="in optimizer")
    assert apart.bytes_per_parameter == 16
    assert (apart.parameters, apart.masters, apart.gradients, apart.copies) == (16, 32, 16, 0)
    assert state_bits(policy, optimizer="sgd").bytes_per_parameter == 8
    assert state_bits(POLICIES["bf16-pure-kahan"]).compensation == 16


@pytest.mark.parametrize("base", ["fp32", "bf16", "int4_g32", "fp8_w"])
def test_a_base_is_what_adapters_stand_on(base: str) -> None:
    shape = model_shape(llama(), name="tiny")
    setup = adapters_on(base, 4, POLICIES["bf16-mixed"])
    predicted = (
        shape.linear_weights * setup.base_bits + (shape.num_parameters - shape.linear_weights) * setup.other_bits
    )
    assert lora_sizes(add_lora(llama(), rank=4, base=base)).base_bytes == pytest.approx(predicted / 8, rel=0.03)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TrainingError, match="did you mean 'adamw'"):
        state_bits(POLICIES["fp32"], optimizer="adamww")
    with pytest.raises(TrainingError, match="no masters"):
        state_bits(POLICIES["bf16-pure"], masters="in optimizer")
    with pytest.raises(TrainingError, match="says nothing of weights"):
        base_bits("as_loaded")
    with pytest.raises(UnknownName):
        base_bits("int5_g1")
    assert set(asdict(state_bits(POLICIES["fp32"]))) >= {"parameters", "gradients", "moments"}
