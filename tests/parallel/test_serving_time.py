"""Times of serving: published tokens per second, bytes of caches, what several devices share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright import comms, hardware
from bitwright.errors import ParallelError
from bitwright.hardware.model_shape import shape_from_sizes
from bitwright.parallel.efficiency import efficiency_of
from bitwright.parallel.network import ClusterNetwork
from bitwright.parallel.serving_time import ServingJob, decode_time, largest_batch, prefill_time

A100 = hardware.get("a100-sxm")
LLAMA_2_7B = shape_from_sizes(
    name="llama-2-7b",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    vocab_size=32000,
    is_gated=True,
    norm="rms",
)


def job(shape=LLAMA_2_7B, tp: int = 1, **more):  # type: ignore[no-untyped-def]
    network = ClusterNetwork(topology=comms.topology(f"a100x{tp}")) if tp > 1 else None
    return ServingJob(
        shape=shape, device=A100, efficiency=efficiency_of(A100)[0], network=network, tp=tp, context=100, **more
    )


@pytest.mark.parametrize(
    ("tp", "bits", "tokens_per_s"),
    # pytorch-labs/gpt-fast, README.md: A100 of 80 GB, batch 1.
    [(1, 16, 104.9), (1, 8, 155.58), (1, 5, 196.8), (4, 16, 254.02)],
)
def test_tokens_of_gpt_fast(tp: int, bits: float, tokens_per_s: float) -> None:
    found = decode_time(job(tp=tp, weight_bits=bits, head_bits=bits))
    assert 1 / found.seconds == pytest.approx(tokens_per_s, rel=0.2)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_decoding_is_bound_by_memory_until_batches_are_large() -> None:
    one, eight, many = (decode_time(job(batch=batch)).seconds for batch in (1, 8, 1024))
    assert eight < 1.3 * one
    assert many > 2 * one


def test_the_cache_counts() -> None:
    short, long = (decode_time(replace(job(batch=32), context=context)) for context in (128, 4096))
    moved = 32 * 2 * 32 * 32 * 128 * 2 * (4096 - 128)
    assert long.seconds - short.seconds == pytest.approx(moved / (efficiency_of(A100)[0].memory_share * 2039e9))
    halved = decode_time(replace(job(batch=32), context=4096, kv_bits=8.0))
    assert halved.parts["attention"] == pytest.approx(long.parts["attention"] / 2)


def test_the_largest_batch_fills_what_weights_leave() -> None:
    found = largest_batch(replace(job(), context=4096))
    # 72 of 80 GB, 13.5 GB of weights, 2.147 GB a sequence of 4096 tokens.
    assert found == 26
    assert largest_batch(replace(job(hardware.KNOWN_MODELS.get("llama-3-70b").shape), context=4096)) == 0


def test_prefill_is_bound_by_products() -> None:
    found = prefill_time(replace(job(), context=4096))
    ideal = 2 * 4096 * 6.6e9 / 312e12
    assert ideal / 0.9 < found.seconds < ideal / 0.5


def test_experts_that_nobody_visits_are_not_read() -> None:
    mixtral = hardware.KNOWN_MODELS.get("mixtral-8x7b").shape
    one, many = (decode_time(job(mixtral, weight_bits=8, batch=batch)).seconds for batch in (1, 64))
    assert many > 2.5 * one


def test_sizes_are_checked() -> None:
    with pytest.raises(ParallelError, match="tp 3 does not divide 32 heads"):
        ServingJob(shape=LLAMA_2_7B, device=A100, efficiency=efficiency_of(A100)[0], tp=3)
    with pytest.raises(ParallelError, match="tp 2 needs a network"):
        ServingJob(shape=LLAMA_2_7B, device=A100, efficiency=efficiency_of(A100)[0], tp=2)
    with pytest.raises(ParallelError, match="batch 0"):
        job(batch=0)
