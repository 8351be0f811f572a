"""Bytes against published block sizes and model figures."""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes
from transformers import LlamaConfig, LlamaForCausalLM

from bitwright.errors import HardwareError
from bitwright.hardware import DecoderShape
from bitwright.hardware.memory import activation_bytes, cache_bytes, kv_cache_bytes, serving_memory, weight_bytes


@pytest.mark.parametrize(
    ("fields", "bytes_per_block"),
    [
        # ggml-common.h: sizeof(block_q4_0), block_q4_1, block_q5_1, block_q8_0, all for 32 weights
        ({"code_bits": 4, "group_size": 32, "scale_bits": 16}, 18),
        ({"code_bits": 4, "group_size": 32, "scale_bits": 16, "zero_point_bits": 16}, 20),
        ({"code_bits": 5, "group_size": 32, "scale_bits": 16, "zero_point_bits": 16}, 24),
        ({"code_bits": 8, "group_size": 32, "scale_bits": 16}, 34),
        # OCP MX v1.0: one E8M0 scale for 32 elements; MXFP4 is 4.25 bits
        ({"code_bits": 4, "group_size": 32, "scale_bits": 8}, 17),
        ({"code_bits": 16}, 64),
    ],
)
def test_blocks_have_the_published_size(fields: dict[str, float], bytes_per_block: int) -> None:
    assert weight_bytes(out_features=3, in_features=64, **fields) == 3 * 2 * bytes_per_block


def test_nvfp4_is_four_and_a_half_bits_and_one_scale() -> None:
    size = weight_bytes(
        out_features=128, in_features=256, code_bits=4, group_size=16, scale_bits=8, tensor_scale_bits=32
    )
    assert size == 128 * 256 * 4.5 / 8 + 4


def test_a_shorter_last_group_has_a_whole_scale() -> None:
    # 576 = 4 x 128 + 64: five scales a row
    assert weight_bytes(out_features=2, in_features=576, code_bits=4, group_size=128, scale_bits=16) == 2 * (288 + 10)


def test_blocks_of_rows_and_columns_share_a_scale() -> None:
    # DeepSeek-V3, kv_b_proj [32768, 512]: its weight_scale_inv has shape [256, 4]
    size = weight_bytes(out_features=32768, in_features=512, code_bits=8, group_size=128, group_rows=128, scale_bits=32)
    assert size == 32768 * 512 + 256 * 4 * 4
    # kv_a_proj_with_mqa [576, 7168]: 576 = 4.5 x 128 rows have five scales a column of blocks, shape [5, 56]
    size = weight_bytes(out_features=576, in_features=7168, code_bits=8, group_size=128, group_rows=128, scale_bits=32)
    assert size == 576 * 7168 + 5 * 56 * 4


def test_a_row_scale_needs_no_group() -> None:
    assert weight_bytes(out_features=10, in_features=100, code_bits=8, scale_bits=32) == 10 * 104


def test_odd_bits_round_up_to_a_byte() -> None:
    assert weight_bytes(out_features=1, in_features=3, code_bits=3) == 2


def test_llama_3_8b_keeps_128_kib_a_token() -> None:
    # 32 layers, 8 KV heads of 128, 16 bits: 2 x 32 x 8 x 128 x 2 = 131,072 bytes; 8,192 tokens are 1 GiB
    assert kv_cache_bytes(num_layers=32, num_kv_heads=8, head_dim=128, num_tokens=1) == 131_072
    assert kv_cache_bytes(num_layers=32, num_kv_heads=8, head_dim=128, num_tokens=8192, batch=4) == 4 * 2**30


def test_kv_scales_are_counted() -> None:
    size = kv_cache_bytes(
        num_layers=1, num_kv_heads=1, head_dim=64, num_tokens=10, value_bits=8, scale_bits_per_token_head=16
    )
    assert size == 2 * 10 * (64 + 2)


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(HardwareError, match="in_features is 0"):
        weight_bytes(out_features=1, in_features=0, code_bits=4)
    with pytest.raises(HardwareError, match="group_size is -1"):
        weight_bytes(out_features=1, in_features=8, code_bits=4, group_size=-1)
    with pytest.raises(HardwareError, match="group_rows is 0"):
        weight_bytes(out_features=1, in_features=8, code_bits=4, group_size=4, group_rows=0)
    with pytest.raises(HardwareError, match="scale_bits is -8"):
        weight_bytes(out_features=1, in_features=8, code_bits=4, scale_bits=-8)
    with pytest.raises(HardwareError, match="num_tokens is 0"):
        kv_cache_bytes(num_layers=1, num_kv_heads=1, head_dim=64, num_tokens=0)


def test_one_cache_is_half_of_a_layer() -> None:
    # Llama 3 8B's keys of one layer: 8192 tokens x 8 heads x 128 x 2 bytes
    assert cache_bytes(num_tokens=8192, num_kv_heads=8, head_dim=128, stored_bits=16) == 16 * 2**20
    # int4 codes with one fp16 scale a head and token: 4.125 bits
    size = cache_bytes(num_tokens=100, num_kv_heads=2, head_dim=128, stored_bits=4 + 16 / 128, batch=3)
    assert size == 3 * 100 * 2 * (64 + 2)


def test_serving_llama_3_8b_adds_up() -> None:
    shape = decoder_shape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, layers=32)
    needs = serving_memory(shape, "gpu", weights=16_060_522_496, kv_cache=4 * 2**30, batch=4, context=8192)
    # 2048 tokens x (4 x 4096 + 3 x 14336) values of 2 bytes; the head's 4 x 128256 logits are fewer
    assert needs.activations == 2048 * (4 * 4096 + 3 * 14336) * 2
    assert needs.workspace == (512 + 32) * 2**20
    assert needs.total == 16_060_522_496 + 4 * 2**30 + needs.activations + needs.workspace
    short = serving_memory(shape, "cpu", weights=1, kv_cache=1, batch=4, context=8, widened_weights=100)
    assert short.activations == max(32 * (4 * 4096 + 3 * 14336) * 2, 32 * 4096 * 2 + 4 * 128256 * 6)
    assert short.workspace == 32 * 2**20 + 200


def test_logits_of_every_token_outweigh_a_small_model() -> None:
    shape = decoder_shape(hidden=8, intermediate=16, heads=2, kv_heads=2, head_dim=4, vocab=50_000, layers=1)
    assert activation_bytes(shape, step_tokens=10, logit_tokens=10, bits=32, logit_bits=32) == 10 * (8 + 50_000) * 4


def decoder_shape(
    *, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int, layers: int
) -> DecoderShape:
    return DecoderShape(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        active_weights=1,
    )


@pytest.mark.parametrize(("intermediate", "kv_heads"), [(512, 4), (384, 2), (32, 4), (32, 1)])
def test_the_activation_peak_is_what_a_model_holds(intermediate: int, kv_heads: int) -> None:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=intermediate,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        vocab_size=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 256, (2, 512))
    with torch.no_grad(), LiveBytes() as counted:
        model(tokens, use_cache=False, logits_to_keep=1)
    shape = decoder_shape(
        hidden=128, intermediate=intermediate, heads=4, kv_heads=kv_heads, head_dim=32, vocab=256, layers=3
    )
    predicted = activation_bytes(shape, step_tokens=2 * 512, logit_tokens=2, bits=32, logit_bits=32)
    assert counted.peak == pytest.approx(predicted, rel=0.05)
