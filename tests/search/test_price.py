"""Bytes counted by hand from what formats store; the roofline's laws."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
from tiny_search import ARCHITECTURES, DEVICE

from bitwright import hardware
from bitwright.models import find_sites
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.search.candidate import Candidate
from bitwright.search.price import AS_LOADED, END_ROLES, Prices, predict_latency, price_model

Make = Callable[[str], tuple[LoadedModel, Prices]]


@pytest.fixture
def priced(make_tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Make:
    def make(architecture: str) -> tuple[LoadedModel, Prices]:
        loaded = from_memory(make_tiny_model(architecture), tiny_tokenizer, name=architecture)
        return loaded, price_model(loaded, find_sites(loaded.model), device=hardware.get(DEVICE))

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_loaded_the_model_weighs_four_bytes_a_parameter(priced: Make, architecture: str) -> None:
    """fp32 in memory; experts, fused rows, norms, biases and tied weights each once."""
    loaded, prices = priced(architecture)
    as_loaded = dict.fromkeys((site.name for site in prices.sites), AS_LOADED)
    assert prices.model_bytes(as_loaded) == 4 * sum(p.numel() for p in loaded.model.parameters())
    assert prices.effective_bits(as_loaded) == prices.nominal_bits(as_loaded) == 32


@pytest.mark.parametrize(
    ("scheme", "stored_bits"),
    [
        ("bf16", lambda n, k: 16 * n * k),
        ("int8_w", lambda n, k: 8 * n * k + 32 * n),
        ("int4_g32", lambda n, k: 4 * n * k + 16 * n * ceil(k / 32)),
        ("int4_g64_min", lambda n, k: 4 * n * k + 32 * n * ceil(k / 64)),
        ("int4_g128_zp", lambda n, k: 4 * n * k + 20 * n * ceil(k / 128)),
        ("mxfp4", lambda n, k: 4 * n * k + 8 * n * ceil(k / 32)),
        ("nvfp4", lambda n, k: 4 * n * k + 8 * n * ceil(k / 16) + 32),
    ],
)
def test_bits_by_hand(priced: Make, scheme: str, stored_bits: Callable[[int, int], int]) -> None:
    _, prices = priced("llama")
    linears = prices.decoder_sites
    assignment = {site.name: AS_LOADED if site.role in END_ROLES else Candidate(scheme=scheme) for site in prices.sites}
    total = sum(stored_bits(*site.shape) for site in linears)
    assert prices.effective_bits(assignment) == pytest.approx(total / sum(n * k for n, k in (s.shape for s in linears)))
    assert sum(prices.site_bytes(site, Candidate(scheme=scheme)) for site in linears) == ceil(total / 8)


def test_nominal_bits_leave_scales_out(priced: Make) -> None:
    _, prices = priced("llama")
    assignment = dict.fromkeys((site.name for site in prices.sites), Candidate(scheme="int4_g32"))
    assert prices.nominal_bits(assignment) == 4
    assert prices.effective_bits(assignment) == 4.5


def test_head_and_embedding_are_no_decoder_linears(priced: Make) -> None:
    _, prices = priced("llama")
    assert {site.role for site in prices.sites} - {site.role for site in prices.decoder_sites} == END_ROLES
    assignment = dict.fromkeys((site.name for site in prices.sites), Candidate(scheme="int8_w"))
    changed = assignment | {site.name: AS_LOADED for site in prices.sites if site.role in END_ROLES}
    assert prices.effective_bits(assignment) == prices.effective_bits(changed)
    assert prices.model_bytes(assignment) < prices.model_bytes(changed)


def test_fewer_bytes_decode_faster_and_never_below_the_bandwidth(priced: Make) -> None:
    """Decoding one token reads every weight once: time ≥ bytes / bandwidth."""
    _, prices = priced("llama")
    device = hardware.get(DEVICE)
    names = [site.name for site in prices.sites]
    times = []
    for scheme in ("int4_g32", "int8_w", "bf16"):
        assignment = dict.fromkeys(names, Candidate(scheme=scheme))
        latency = predict_latency(prices, assignment)
        read = sum(prices.site_bytes(s, assignment[s.name]) for s in prices.sites if s.role != "embedding")
        assert latency.decode_s_per_token >= read / (device.memory_gb_per_s * 1e9) * (1 - 1e-9)
        assert latency.status == "predicted"
        assert latency.prefill_s >= latency.decode_s_per_token
        times.append(latency.decode_s_per_token)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(latency.reference_decode_s_per_token)
