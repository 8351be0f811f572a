"""Bytes of training against published formulas, and against what PyTorch allocates on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from torch import Tensor, UntypedStorage, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bitwright.errors import HardwareError
from bitwright.hardware import KNOWN_MODELS, ModelShape
from bitwright.hardware.memory import ActivationSetup, Sharding, StateBits, layer_tensors, training_memory
from bitwright.hardware.memory.adapters import adapter_parameters
from bitwright.hardware.memory.training import AdapterSetup
from bitwright.hardware.memory.training_activations import end_bits, layer_bits
from bitwright.models.shape import model_shape

#: Parameters and gradients of 16 bits, masters and Adam's moments in the optimizer: what ZeRO's paper counts.
CLASSIC = StateBits(parameters=16, masters=32, gradients=16, moments=64)
#: fp32 parameters under autocast.
AUTOCAST = StateBits(parameters=32, copies=16, head_copies=16, gradients=32, moments=64)
GPT3 = KNOWN_MODELS.get("gpt3-175b").shape
LLAMA_7B = KNOWN_MODELS.get("llama-7b").shape


def states_of(shape: ModelShape, zero: int, gpus: int) -> float:
    """Bytes per parameter of all states on one GPU."""
    found = training_memory(
        shape, CLASSIC, ActivationSetup(batch=1, sequence=1), sharding=Sharding(num_gpus=gpus, zero=zero)
    )
    names = ("parameters", "fp32 masters", "gradients", "optimizer moments")
    return sum(line.num_bytes for line in found.lines if line.name in names) / shape.num_parameters


@pytest.mark.parametrize("gpus", [1, 8, 64])
def test_zero_shares_what_its_paper_says(gpus: int) -> None:
    # arXiv:1910.02054, figure 1, with K = 12
    assert states_of(LLAMA_7B, 0, gpus) == pytest.approx(2 + 2 + 12)
    assert states_of(LLAMA_7B, 1, gpus) == pytest.approx(2 + 2 + 12 / gpus)
    assert states_of(LLAMA_7B, 2, gpus) == pytest.approx(2 + (2 + 12) / gpus)
    assert states_of(LLAMA_7B, 3, gpus) == pytest.approx(16 / gpus)


def test_the_example_of_zeros_paper() -> None:
    # the same figure: 7.5 billion parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB
    taken = [7.5 * states_of(LLAMA_7B, zero, 64) for zero in range(4)]
    assert taken == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def gpt_layer(hidden: int, heads: int, ways: int = 1, *, sequence_parallel: bool = False) -> tuple[float, int]:
    """(bytes of one layer per token, tokens of a sequence) of a GPT with dropout in 16 bits, scores written out."""
    sequence = 2048
    shape = ModelShape(
        name="gpt",
        num_layers=1,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=1,
        is_gated=False,
        norm="layer",
        linear_weights=1,
        embedding_weights=1,
        head_weights=0,
        other_parameters=0,
    )
    setup = ActivationSetup(batch=1, sequence=sequence, attention="stored", dropout_bits=8, norm_bits=16)
    bits = layer_bits(shape, setup, tensor_parallel=ways, is_sequence_parallel=sequence_parallel)
    return bits / 8, sequence


@pytest.mark.parametrize(("hidden", "heads"), [(12288, 96), (6144, 64)])
def test_a_gpt_layer_keeps_what_korthikanti_counts(hidden: int, heads: int) -> None:
    # arXiv:2205.05198, equations 1, 2 and 4; mean and deviation of its two norms (16 bytes a token) are not in them
    found, sequence = gpt_layer(hidden, heads)
    scores = 5 * heads * sequence / hidden
    assert found - 16 == pytest.approx(hidden * (34 + scores))
    found, _ = gpt_layer(hidden, heads, 8)
    assert found - 16 == pytest.approx(hidden * (10 + (24 + scores) / 8))
    found, _ = gpt_layer(hidden, heads, 8, sequence_parallel=True)
    assert found - 2 == pytest.approx(hidden * (34 + scores) / 8)


def test_a_fused_gated_layer_in_16_bits() -> None:
    # norms and their inputs once, q, k, v and what attention gives, gate, up, both factors, their product
    setup = ActivationSetup(batch=1, sequence=8192, norm_bits=16, keeps_normed=False)
    shape = KNOWN_MODELS.get("llama-3-8b").shape
    kept = sum(tensor.bits for tensor in layer_tensors(shape, setup)) / 8
    queries, kv, h, f = 4096, 1024, 4096, 14336
    assert kept == 2 * (4 * h + 2 * queries + 2 * kv) + 2 * 4 * f + 4 * 32 + 2 * 4


def test_claims_that_circulate() -> None:
    setup = ActivationSetup(batch=1, sequence=2048)
    large = KNOWN_MODELS.get("llama-65b").shape
    mixed = training_memory(large, AUTOCAST, setup)
    kept = {line.name: line.num_bytes for line in mixed.lines}
    # a 65B model's parameters take 260 GB in fp32, and 130 GB more in the copies that products read, not 195 in all
    assert kept["parameters"] == pytest.approx(261e9, rel=0.01)
    assert kept["parameters"] + kept["copies for products"] == pytest.approx(390e9, rel=0.01)
    assert mixed.peak > 16 * large.num_parameters
    # a 7B model does not fit 48 GB; a 175B model does not fit 8 GPUs of 80 GB, whatever is shared
    assert training_memory(LLAMA_7B, CLASSIC, setup).peak > 107e9
    eight = Sharding(num_gpus=8, zero=3)
    assert training_memory(GPT3, CLASSIC, setup, sharding=eight).peak > 16 * 174e9 / 8 > 4 * 80e9


def test_what_is_alive_when() -> None:
    setup = ActivationSetup(batch=2, sequence=64)
    once = training_memory(LLAMA_7B, AUTOCAST, setup, kind="cpu", update_bits=32)
    summed = training_memory(LLAMA_7B, AUTOCAST, setup, kind="cpu", accumulates=True)
    gradients = 4 * LLAMA_7B.num_parameters
    assert summed.at("loss") - once.at("loss") == gradients
    assert once.at("update") - once.at("backward") == gradients
    assert once.peak == max(once.at(instant) for instant in ("loss", "backward", "update"))
    assert "gradients" not in {line.name for line in once.lines if "loss" in line.alive}


def test_recomputing_leaves_inputs_and_one_layer() -> None:
    setup = ActivationSetup(batch=1, sequence=1024, recompute="full")
    found = training_memory(LLAMA_7B, CLASSIC, setup)
    inputs = found.line("inputs of layers")
    assert inputs is not None and inputs.num_bytes == 32 * 1024 * 4096 * 2
    assert found.line("one layer, recomputed") is not None and found.line("activations of layers") is None


def test_adapters_have_few_parameters() -> None:
    # arXiv:2305.14314 trains all linears; rank 64 on LLaMA 7B is 159,907,840 parameters (peft's printout for it)
    assert adapter_parameters(LLAMA_7B, 64) == 159_907_840
    frozen = AdapterSetup(rank=64, base_bits=4.125)
    setup = ActivationSetup(batch=1, sequence=512, casts_each_input=True)
    found = training_memory(LLAMA_7B, StateBits(), setup, adapters=frozen)
    base = found.line("frozen base")
    assert base is not None
    others = 6_738_415_616 - 6_476_005_376
    assert base.num_bytes == 6_476_005_376 * 4.125 / 8 + 2 * others
    moments = found.line("optimizer moments")
    assert moments is not None and moments.num_bytes == 8 * 159_907_840


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(HardwareError, match="6 GPUs with tensor parallelism over 4"):
        Sharding(num_gpus=6, tensor_parallel=4)
    with pytest.raises(HardwareError, match="ZeRO stage 4"):
        Sharding(zero=4)
    with pytest.raises(HardwareError, match="batch is 0"):
        ActivationSetup(batch=0, sequence=1)
    with pytest.raises(HardwareError, match="recompute is 'some'"):
        ActivationSetup(batch=1, sequence=1, recompute="some")  # type: ignore[arg-type]
    with pytest.raises(HardwareError, match="moments is -1"):
        StateBits(moments=-1)


# --- measured -------------------------------------------------------------------------------------------------------


def llama(kv_heads: int = 4) -> Any:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=512,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train()


def gpt2() -> Any:
    config = GPT2Config(n_embd=128, n_layer=3, n_head=4, vocab_size=512, n_positions=256)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config).train()


def saved_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd keeps, the model's own parameters not among them."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (llama, {}),
        (lambda: llama(kv_heads=2), {"is_kv_repeated": True}),
        (gpt2, {"activation_tensors": 4}),
    ],
)
def test_activations_are_what_autograd_keeps(make: Callable[[], Any], facts: dict[str, Any], dtype: str) -> None:
    model = make()
    if dtype == "bf16":
        model = model.bfloat16()
    tokens = torch.randint(0, 512, (2, 256))

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            return model(tokens, labels=tokens, use_cache=False).loss

    shape = model_shape(model, name="tiny")
    stream, compute = {"fp32": (32, 32), "bf16": (16, 16), "autocast": (32, 16)}[dtype]
    setup = ActivationSetup(batch=2, sequence=256, stream_bits=stream, compute_bits=compute, **facts)
    copies = (shape.linear_weights + shape.read_by_head) * 2 if dtype == "autocast" else 0
    logits = 2 * 256 * 512 * 4  # log-softmax; the logits themselves are the caller's
    per_token = 3 * layer_bits(shape, setup) + end_bits(shape, setup)
    predicted = 2 * 256 * per_token / 8 + logits + copies
    assert saved_bytes(model, run) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_whole_step_of_adamw_takes_what_is_predicted(is_mixed: bool, batch: int) -> None:
    tokens = torch.randint(0, 512, (batch, 256))
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the moments are made in the first step
    own = [p for p in model.parameters()]
    kept = sum(t.untyped_storage().nbytes() for state in optimizer.state.values() for t in state.values())
    with LiveBytes() as counted:
        step()
    measured = counted.peak + sum(p.untyped_storage().nbytes() for p in own) + kept
    shape = model_shape(model, name="tiny")
    setup = ActivationSetup(batch=batch, sequence=256, stream_bits=32, compute_bits=16 if is_mixed else 32)
    states = AUTOCAST if is_mixed else StateBits()
    predicted = training_memory(shape, states, setup, kind="cpu")
    workspace = predicted.line("context and workspace of products")
    assert workspace is not None
    assert measured == pytest.approx(predicted.peak - workspace.num_bytes, rel=0.1)
    assert kept == pytest.approx(8 * shape.num_parameters, rel=0.001)


def test_what_an_update_holds_is_bounded() -> None:
    setup = ActivationSetup(batch=1, sequence=8)
    found = training_memory(LLAMA_7B, StateBits(parameters=16), setup, update_bits=64, update_elements=1 << 25)
    scratch = found.line("temporaries of the update")
    assert scratch is not None and scratch.num_bytes == 8 << 25 and scratch.alive == ("update",)


def test_a_base_in_fp32_is_copied_for_products_in_16_bits() -> None:
    setup = ActivationSetup(batch=1, sequence=8)
    wide = AdapterSetup(rank=8, base_bits=32, other_bits=32, copy_bits=16)
    found = training_memory(LLAMA_7B, StateBits(), setup, adapters=wide).line("copies for products")
    assert found is not None and found.num_bytes == 2 * (6_476_005_376 + 131_072_000)
