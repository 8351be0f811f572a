"""Times of attention, steps and floors against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright import hardware
from bitwright.errors import HardwareError
from bitwright.hardware import DecoderShape, latency

H100 = hardware.get("h100")
#: Llama 3.1 8B, from its config.json; its linears have 6,979,321,856 weights.
LLAMA_8B = DecoderShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    active_weights=32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336),
)


def test_a_token_reads_the_whole_cache_once() -> None:
    time = latency.attention_time(
        H100, batch=4, query_tokens=1, context=8192, num_heads=32, num_kv_heads=8, head_dim=128
    )
    assert time.bound == "memory"
    # keys and values: 2 x 4 x 8192 x 8 x 128 x 2 bytes; q and output: 2 x 4 x 32 x 128 x 2 bytes
    assert time.moved_bytes == 134_217_728 + 65_536
    assert time.seconds == pytest.approx(134_283_264 / 3350e9)
    # q k and p v: 2 operations a number each
    assert time.flops == 2 * 2 * 4 * 32 * 128 * 8192
    assert time.status == "predicted"


def test_fewer_bits_of_the_cache_are_read_faster() -> None:
    def seconds(bits: float) -> float:
        return latency.attention_time(
            H100, batch=1, query_tokens=1, context=100_000, num_heads=32, num_kv_heads=8, head_dim=128, kv_bits=bits
        ).seconds

    assert seconds(16) / seconds(4.125) == pytest.approx(16 / 4.125, rel=1e-3)


def test_the_causal_mask_leaves_half_of_the_square() -> None:
    assert latency.visible_pairs(4, 4) == 1 + 2 + 3 + 4
    assert latency.visible_pairs(2, 10) == 9 + 10
    assert latency.visible_pairs(1, 10) == 10
    assert latency.visible_pairs(4, 4, causal=False) == 16


def test_formats_of_scores_and_values_have_their_own_rates() -> None:
    def attention(score: str, value: str) -> latency.OperationTime:
        return latency.attention_time(
            H100,
            batch=1,
            query_tokens=8192,
            context=8192,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            score_format=score,
            value_format=value,
        )

    half = 2 * 32 * 128 * 8192 * 8193 / 2
    assert attention("bf16", "bf16").seconds == pytest.approx(2 * half / 989.4e12)
    assert attention("fp8_e4m3", "bf16").seconds == pytest.approx(half / 989.4e12 + half / 1978.9e12)
    assert attention("fp8_e4m3", "bf16").compute_formats == ("fp8_e4m3", "bf16")


def test_elementwise_work_is_all_moving() -> None:
    time = latency.elementwise_time(H100, tokens=10, values_per_token=LLAMA_8B.elementwise_values)
    # two norms 4 h, two additions 6 h, the gate 3 i, rotation of 32 + 8 heads of 128 there and back
    assert LLAMA_8B.elementwise_values == 10 * 4096 + 3 * 14336 + 2 * 40 * 128
    assert time.seconds == pytest.approx(10 * LLAMA_8B.elementwise_values * 2 / 3350e9)
    assert (time.bound, time.flops, time.compute_formats) == ("memory", 0, ())


def test_decoding_an_eight_billion_model_reads_its_weights() -> None:
    step = latency.step_time(H100, LLAMA_8B, query_tokens=1, context=1024, compute_format="bf16")
    weights = 2 * (LLAMA_8B.active_weights + 4096 * 128256)
    assert LLAMA_8B.active_weights == 6_979_321_856
    # all 15 GB of weights at 3350 GB/s are 4.48 ms; cache and the rest add a little
    assert weights / 3350e9 < step.seconds < 1.05 * weights / 3350e9
    assert all(part.bound == "memory" for part in step.parts.values())
    assert step.seconds == pytest.approx(sum(part.seconds for part in step.parts.values()))


def test_prefill_is_bound_by_the_matrix_unit() -> None:
    step = latency.step_time(H100, LLAMA_8B, query_tokens=4096, context=4096, compute_format="bf16")
    assert step.parts["linear"].bound == "compute"
    assert step.parts["linear"].seconds == pytest.approx(2 * 4096 * LLAMA_8B.active_weights / 989.4e12)


def test_a_batch_reads_the_weights_once_and_the_caches_each() -> None:
    one, four = (
        latency.step_time(H100, LLAMA_8B, batch=batch, query_tokens=1, context=8192, compute_format="bf16")
        for batch in (1, 4)
    )
    assert four.parts["linear"].seconds == one.parts["linear"].seconds
    assert four.parts["attention"].seconds == pytest.approx(4 * one.parts["attention"].seconds)


def test_launches_count_where_they_were_measured() -> None:
    known = replace(H100, launch_s=4e-6)
    achieved = latency.step_time(known, LLAMA_8B, query_tokens=1, context=1, compute_format="bf16", rates="achieved")
    assert achieved.launch_s == pytest.approx((14 * 32 + 1) * 4e-6)
    assert latency.step_time(known, LLAMA_8B, query_tokens=1, context=1, compute_format="bf16").launch_s == 0


@pytest.mark.parametrize("device", ["h100", "a100", "l4", "x86-avx512-bf16", "tpu-v5e"])
@pytest.mark.parametrize("query_tokens", [1, 2048])
def test_no_step_is_below_the_floor(device: str, query_tokens: int) -> None:
    chip = hardware.get(device)
    floor = latency.latency_floor(
        chip, LLAMA_8B, query_tokens=query_tokens, context=2048, least_weight_bits=4.125, least_kv_bits=4.25
    )
    for name in chip.matmul_tflops:
        for weight_bits, kv_bits in ((4.125, 4.25), (8, 8), (16, 16)):
            step = latency.step_time(
                chip,
                LLAMA_8B,
                query_tokens=query_tokens,
                context=2048,
                compute_format=name,
                weight_bits=weight_bits,
                kv_bits=kv_bits,
            )
            assert step.seconds >= floor.seconds


def test_the_floor_says_what_makes_it() -> None:
    decode = latency.latency_floor(H100, LLAMA_8B, query_tokens=1, context=1, least_weight_bits=4)
    moved = LLAMA_8B.active_weights / 2 + 2 * 4096 * 128256 + 2 * 32 * 8 * 128 * 2
    assert decode.bound == "memory" and decode.seconds == pytest.approx(moved / 3350e9)
    assert decode.why == "h100-sxm: 4.54 GB of weights and cache at 3350 GB/s"
    prefill = latency.latency_floor(H100, LLAMA_8B, query_tokens=8192, context=8192, least_weight_bits=4)
    assert prefill.bound == "compute"
    assert "at 1978.9 TFLOP/s, the device's fastest rate (fp8_e4m3)" in prefill.why


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(HardwareError, match="num_kv_heads is 0"):
        replace(LLAMA_8B, num_kv_heads=0)
    with pytest.raises(HardwareError, match="context_beyond_the_queries is -1"):
        latency.visible_pairs(10, 8)
    with pytest.raises(HardwareError, match="batch is 0"):
        latency.attention_time(H100, batch=0, query_tokens=1, context=1, num_heads=1, num_kv_heads=1, head_dim=1)
    with pytest.raises(HardwareError, match="no matrix rate for int4"):
        latency.step_time(H100, LLAMA_8B, query_tokens=1, context=1, compute_format="int4")
