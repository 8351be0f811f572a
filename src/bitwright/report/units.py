"""How figures are spelled for people: sizes, KL, percentages, intervals. The same words in HTML and in the terminal."""

from __future__ import annotations

import math
import re

from bitwright.comms.sizes import spell_count as spell_count
from bitwright.plan import Interval, Limit

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

_AFTER_NUMBERS = (*_UNITS, *"% s ms µs ns nats dB bits tokens token sites site sequences sequence threads".split())
#: The space between a number and its unit, at which no line should break.
BEFORE_UNIT = re.compile(rf"(?<=[\d∞]) (?=(?:{'|'.join(_AFTER_NUMBERS)})(?![\w-]))")

#: Limit → what a reader calls it.
LIMIT_TITLES = {
    "max_kl": "KL divergence (nats)",
    "max_ppl_increase": "perplexity increase",
    "max_memory_bytes": "size of the weights",
    "effective_bits": "effective bits per weight",
    "nominal_bits": "nominal bits per weight",
    "device_memory_bytes": "memory on the device",
    "latency_sla_s": "time of a decode step",
    "min_tokens_per_s": "tokens per second",
    "prefill_sla_s": "time to read the prompts",
    "max_overflow_risk": "overflows per million values",
}


def spell_bytes(num_bytes: float) -> str:
    """``94371840`` → ``"90.0 MiB"`` (three significant digits, powers of 1024)."""
    value, unit = float(num_bytes), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    decimals = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{decimals}f} {_UNITS[unit]}"


def spell_number(value: float | None) -> str:
    """Three significant digits, ``"–"`` for None and NaN: ``0.012345`` → ``"0.0123"``, ``1.2e-05`` → ``"1.20e-5"``."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:#.3g}"
    return f"{value:.0f}" if "e" in text else text.rstrip(".")


def spell_interval(interval: Interval) -> str:
    """``"0.0171 [0.0158, 0.0184]"``."""
    return f"{spell_number(interval.mean)} [{spell_number(interval.low)}, {spell_number(interval.high)}]"


def spell_percent(ratio: float, *, signed: bool = False) -> str:
    """``0.0114`` → ``"1.14 %"``."""
    value = 100 * ratio
    decimals = 2 if abs(value) < 9.995 else 1
    return f"{value:{'+' if signed else ''}.{decimals}f} %".replace("-", "−")


def spell_share(ratio: float) -> str:
    """A share of many: ``0`` → ``"0"``, ``0.0114`` → ``"1.14 %"``; what is not 0 never reads like it."""
    if ratio == 0:
        return "0"
    return "< 0.01 %" if ratio < 5e-5 else spell_percent(ratio)


def spell_decibels(value: float) -> str:
    """A ratio in dB: ``25.552`` → ``"25.6 dB"``; ``"exact"`` for inf, ``"–"`` for NaN."""
    if math.isnan(value):
        return "–"
    return "exact" if value == math.inf else f"{value:.1f} dB".replace("-", "−").replace("inf", "∞")


def spell_seconds(seconds: float) -> str:
    """``0.0041`` → ``"4.10 ms"``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{spell_number(seconds * factor)} {unit}"
    return f"{spell_number(seconds * 1e9)} ns"


def spell_limit_value(name: str, value: float) -> str:
    """A value of the limit called ``name`` in its own unit."""
    if name.endswith("_bytes"):
        return spell_bytes(value)
    if name.endswith("_s") and not is_lower_limit(name):
        return spell_seconds(value)
    if name == "max_ppl_increase":
        return spell_percent(value, signed=True)
    return spell_number(value)


def is_lower_limit(name: str) -> bool:
    """Whether a limit is kept by what is above it."""
    return name.startswith("min_")


def spell_excess(limit: Limit) -> str:
    """By how much a value lies over (or under) its limit: ``"12 % over"``."""
    if limit.limit == 0:
        return "over" if limit.value > 0 else "at the limit"
    share = limit.value / limit.limit - 1
    value = abs(100 * share)
    percent = f"{value:,.0f} %" if value >= 999.5 else f"{value:.3g} %"
    return f"{percent} over" if share > 0 else f"{percent} under" if share < 0 else "at the limit"
