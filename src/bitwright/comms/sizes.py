"""Bytes as people write them for collectives: one size, several, or a range; and counts with their noun.

64MiB        8B,1KiB,3MiB        8B..256MiB        (units are powers of two: K and KiB are 1,024 bytes)
"""

from __future__ import annotations

import re

from bitwright.errors import CommsError

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str, factor: int = 4) -> tuple[int, ...]:
    """Return the bytes that "8B..256MiB" (every power of `factor` between) or "1KiB,3MiB" spells.

    Raises:
        CommsError: no size, or a range that goes down.
    """
    low, dots, high = text.partition("..")
    if not dots:
        return tuple(_parse_size(word) for word in text.split(","))
    size, last = _parse_size(low), _parse_size(high)
    if last < size:
        raise CommsError(f"sizes {text!r} go down; write the smaller one first")
    found = []
    while size < last:
        found.append(size)
        size *= factor
    return (*found, last)


def spell_count(number: int, noun: str) -> str:
    """``"1 rank"``, ``"1,024 ranks"``: a noun whose plural ends in s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = "" if match is None else match[2].upper()
    if match is None or (unit or "B") not in _UNITS or float(match[1]) * _UNITS[unit or "B"] < 1:
        raise CommsError(f"size {text.strip()!r} cannot be read; write 8B, 64KiB or 256MiB")
    return int(float(match[1]) * _UNITS[unit or "B"])
