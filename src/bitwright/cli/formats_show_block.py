"""``bitwright formats show`` for block formats: the scale of a block, then each number beside what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.text import Text

from bitwright import formats
from bitwright.cli.number_text import spell_count, spell_number, spell_percent, spell_short, spell_signed
from bitwright.cli.table import new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake
from bitwright.formats.block_codec import BlockCodec
from bitwright.formats.blocks import BlockCodes, BlockFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.explain import explain
from bitwright.formats.written_number import Real, parse_number

#: Bytes in one line of a block that is stored as bytes.
_BYTES_A_LINE = 16


def print_block(console: Console, format: BlockCodec, words: Sequence[str], rounding: str) -> None:
    """Print how numbers are stored, in as many blocks as they take.

    Raises:
        FormatError: a word is no number, or the format refuses it.
        UnknownName: no such rounding.
        UsageMistake: the rounding mode draws.
    """
    mode = formats.ROUNDINGS.get(rounding)
    if mode is not None and mode.needs_seed:
        raise UsageMistake(
            f"rounding '{rounding}' draws, and a block has too many outcomes to list; show it in a scalar format"
        )
    numbers = [parse_number(word) for word in words]
    single = formats.get("fp32")
    given = [explain(single, number).point.value for number in numbers]
    missing = 0 if format.allows_short_blocks else -len(given) % format.block_size
    stored = format.encode(np.array([*given, *[0.0] * missing], dtype=np.float32), rounding)
    kept = [float(value) for value in np.asarray(format.decode(stored)).reshape(-1)]
    codes = stored.codes if isinstance(stored, BlockCodes) else None
    console.print(Text(f"{spell_count(len(words), 'number')} in {format.name}", style="bold"))
    rows = _scale_rows(format, stored) if isinstance(format, BlockFormat) else _byte_rows(stored)
    if missing:
        rows.append(
            (
                "filled up",
                f"with {spell_count(missing, 'zero')}: a block has {format.block_size} values, none may be short",
            )
        )
    changed = sum(number != value for number, value in zip(numbers, given, strict=True) if isinstance(number, Fraction))
    if changed:
        were = "was" if changed == 1 else "were"
        rows.append(
            (
                "first",
                f"{changed} of {spell_count(len(numbers), 'number')} {were} rounded to fp32, where blocks start from",
            )
        )
    print_rows(console, rows)
    console.print()
    has_blocks = len(numbers) > format.block_size
    table = new_table(
        ("number", False),
        *([("block", True)] if has_blocks else []),
        *([("code", True)] if codes is not None else []),
        ("kept as", True),
        ("error", True),
        ("", True),
    )
    for index, (word, number) in enumerate(zip(words, numbers, strict=True)):
        error, percent = _spell_error(number, kept[index])
        table.add_row(
            Text(word),
            *([str(index // format.block_size)] if has_blocks else []),
            *([_hex(int(codes[index]), format.code_bits)] if codes is not None else []),
            spell_short(kept[index], digits=9),
            error,
            percent,
        )
    print_table(console, table)


def print_block_facts(console: Console, format: BlockCodec) -> None:
    """Print the record of a block format."""
    row = format.row
    console.print(Text(row.name, style="bold"))
    rows = [
        ("bits per value", f"{row.bits_per_value:g}, the block's scale included"),
        ("element", row.element),
        ("block", f"{row.block_size} values{'; the last may be shorter' if format.allows_short_blocks else ''}"),
        ("scale", row.scale_format),
        ("rule", row.rule),
        ("largest", spell_number(row.max, digits=12)),
        ("also called", ", ".join(row.aliases)),
        ("source", row.source),
    ]
    print_rows(console, [(title, text) for title, text in rows if text])


def _scale_rows(format: BlockFormat, stored: BlockCodes) -> list[tuple[str, str]]:
    scales = decode_codes(format.scale, stored.scale_codes)
    several = len(scales) > 1
    rows = [
        (
            f"scale of block {index}" if several else "scale",
            f"{spell_number(float(scale), digits=12)} ({_hex(int(code), format.scale.bits)} in {format.scale_format}), "
            f"by the rule {format.scale_rule}",
        )
        for index, (code, scale) in enumerate(zip(stored.scale_codes, scales, strict=True))
    ]
    if stored.tensor_scale is not None:
        rows.append(("tensor scale", f"{spell_short(float(stored.tensor_scale), digits=9)}, in fp32"))
    if format.element_exponent:
        rows.append(("element", f"{format.element.name} × 2^{format.element_exponent}"))
    else:
        rows.append(("element", format.element.name))
    return rows


def _byte_rows(stored: object) -> list[tuple[str, str]]:
    flat = np.ascontiguousarray(np.asarray(stored)).view(np.uint8).reshape(-1)
    lines = [
        " ".join(f"{byte:02x}" for byte in flat[start : start + _BYTES_A_LINE])
        for start in range(0, flat.size, _BYTES_A_LINE)
    ]
    return [("bytes" if not index else "", line) for index, line in enumerate(lines)]


def _spell_error(number: Real, kept: float) -> tuple[str, str]:
    if not math.isfinite(kept) or (isinstance(number, float) and number != 0):
        return "", ""
    error = Fraction(kept) - Fraction(number)
    if not error:
        lost = number == 0 and math.copysign(1, number) != math.copysign(1, kept)
        return "sign lost" if lost else "exact", ""
    return spell_signed(error, 6).removeprefix("≈ "), spell_percent(error / Fraction(number)) if number else ""


def _hex(code: int, bits: int) -> str:
    return f"0x{code:0{-(-bits // 4)}x}"
