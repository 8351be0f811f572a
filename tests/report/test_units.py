"""Spelling of figures: closed forms."""

from __future__ import annotations

import math

import pytest

from bitwright.plan import Limit
from bitwright.report.units import (
    spell_bytes,
    spell_count,
    spell_decibels,
    spell_excess,
    spell_limit_value,
    spell_number,
    spell_percent,
    spell_seconds,
    spell_share,
)


def test_one_is_no_plural() -> None:
    assert [spell_count(n, "site") for n in (0, 1, 2, 1024)] == ["0 sites", "1 site", "2 sites", "1,024 sites"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (94_371_840, "90.0 MiB"),
        (269_030_016, "257 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (3 * 1024**5, "3072 TiB"),
    ],
)
def test_bytes(num_bytes: int, text: str):
    assert spell_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.012345, "0.0123"),
        (1.2e-5, "1.20e-5"),
        (-3.0, "-3.00"),
        (123.4, "123"),
        (19.714, "19.7"),
        (123456.0, "123456"),
        (4.2e7, "4.20e7"),
        (math.inf, "∞"),
        (math.nan, "–"),
    ],
)
def test_numbers(value: float | None, text: str):
    assert spell_number(value) == text


def test_percent_seconds_and_limits():
    assert spell_percent(0.0114) == "1.14 %"
    assert spell_percent(-0.25, signed=True) == "−25.0 %"
    assert [spell_seconds(value) for value in (2, 0.0041, 5e-5, 2e-9)] == ["2.00 s", "4.10 ms", "50.0 µs", "2.00 ns"]
    assert spell_limit_value("max_memory_bytes", 94_371_840) == "90.0 MiB"
    assert spell_limit_value("max_ppl_increase", 0.01) == "+1.00 %"
    assert spell_excess(Limit(name="max_kl", limit=0.02, value=0.03, status="missed")) == "50 % over"
    assert spell_excess(Limit(name="max_memory_bytes", limit=1024, value=34202, status="missed")) == "3,240 % over"
    assert spell_excess(Limit(name="max_kl", limit=0.02, value=0.01, status="measured")) == "50 % under"
    assert spell_excess(Limit(name="max_kl", limit=0.02, value=0.02, status="measured")) == "at the limit"


def test_shares_and_decibels():
    assert [spell_share(ratio) for ratio in (0, 1e-9, 0.0114, 1)] == ["0", "< 0.01 %", "1.14 %", "100.0 %"]
    assert [spell_decibels(value) for value in (25.55, -3.2, math.inf, math.nan)] == [
        "25.6 dB",
        "−3.2 dB",
        "exact",
        "–",
    ]
