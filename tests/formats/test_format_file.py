"""Formats from a TOML file: the example of the docs, and every way to get one wrong."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bitwright import formats
from bitwright.catalog import Catalog
from bitwright.errors import BitwrightError, FormatError
from bitwright.formats import BlockFormat, CodebookFormat, FloatFormat, IntFormat
from bitwright.formats.decode import decode_codes

EXAMPLE = Path(__file__).parents[2] / "docs" / "snippets" / "my-format.toml"

E4M3 = """
[[format]]
name = "mine"
kind = "float"
exponent_bits = 4
fraction_bits = 3
bias = 7
specials = "top_nan"
source = "a test"
"""
INTEGER = """
[[format]]
name = "mine"
kind = "integer"
bits = 5
source = "a test"
"""
CODEBOOK = """
[[format]]
name = "mine"
kind = "codebook"
bits = 1
values = [0.1, -1]
source = "a test"
"""


@pytest.fixture
def own_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogs for one test, since what is added stays until the process ends."""
    fields = ("kind", "package", "attribute", "record_type")
    for name in ("FORMATS", "BLOCK_FORMATS"):
        catalog = getattr(formats, name)
        monkeypatch.setattr(formats, name, Catalog(**{field: getattr(catalog, field) for field in fields}))


def written(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_of_the_docs_is_read_and_used(own_catalog: None) -> None:
    e3m4, int10, powers, bfp6 = formats.read_format_file(EXAMPLE)
    assert isinstance(e3m4, FloatFormat) and isinstance(int10, IntFormat) and isinstance(powers, CodebookFormat)
    assert (e3m4.bits, e3m4.max, e3m4.has_nan, int10.min, powers.max) == (8, 31, False, -512, 1)
    assert "int10" not in formats.names()
    for format in (e3m4, int10, powers, bfp6):
        formats.add(format, origin=str(EXAMPLE))
    assert formats.get("int10") is int10 and formats.resolve("E3M4_finite") == "fp8_e3m4_finite"
    assert formats.round("powers_of_two", [0.8, -0.1, -5]).tolist() == [1.0, 0.0, -1.0]
    assert "powers_of_two" in {row.name for row in formats.rows()}
    # Block floating point by hand: 3 lies in [2, 4), so that 6-bit mantissas step by 2 · 2**-4 = 0.125.
    assert isinstance(bfp6, BlockFormat) and bfp6.row.bits_per_value == 6 + 8 / 16
    assert formats.round("bfp6_b16", [3, -1, 0.09375, 0.03125, -3.96875]).tolist() == [3, -1, 0.125, 0, -4]


def test_a_record_from_a_file_is_the_format_of_ml_dtypes(tmp_path: Path) -> None:
    (mine,) = formats.read_format_file(written(tmp_path, E4M3))
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_codes(mine, codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def test_codebooks_are_rounded_to_fp32(tmp_path: Path) -> None:
    (mine,) = formats.read_format_file(written(tmp_path, CODEBOOK + "golden = [[0, 0.1]]"))
    assert isinstance(mine, CodebookFormat) and mine.values == (float(np.float32(0.1)), -1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", r"is no TOML \(Invalid value \(at .*\); mend"),
        ("", r"is made of \[\[format\]\] tables, and this one is empty"),
        ("[formats]\nname = 'x'", r"is made of \[\[format\]\] tables, not 'formats'"),
        ("format = 3", r"is made of \[\[format\]\] tables, not 'format'"),
        (E4M3 + "zzz = 1", r"unknown field 'zzz'\. Known: name, kind, "),
        (E4M3 + "has_zeros = true", "unknown field 'has_zeros'; did you mean 'has_zero'"),
        (E4M3.replace("bias", "biass"), "'bias' is missing; did you mean 'biass'"),
        (E4M3.replace('source = "a test"', ""), r"'source' is missing\."),
        (E4M3.replace('"a test"', '""'), "format 'mine' has no source"),
        (E4M3.replace('"a test"', "3"), "'source' is 3; give text"),
        (E4M3.replace("bias = 7", "bias = 7.5"), "'bias' is 7.5; give a whole number"),
        (E4M3.replace("bias = 7", "bias = true"), "'bias' is True; give a whole number"),
        (E4M3.replace("bias = 7", "bias = 4000"), r"format 'mine' reaches from 2\*\*-"),
        (E4M3 + "signed = 1", "'signed' is 1; give true or false"),
        (E4M3.replace("top_nan", "top-nan"), "unknown specials 'top-nan'; did you mean 'top_nan'"),
        (E4M3.replace('"float"', '"floating"'), "unknown kind 'floating'; did you mean 'float'"),
        (E4M3.replace('"mine"', '"My Format"'), "'My Format' is no name; write lower-case"),
        (E4M3 + "aliases = 'a'", "'aliases' is 'a'; give a list"),
        (E4M3 + "aliases = [1]", r"'aliases' is \[1\]; list texts"),
        (E4M3 + "golden = [[0x38, 2.0]]", "code 0x38 of mine is 1.0 by its other fields, but 2.0 by 'golden'"),
        (E4M3 + "golden = [[0x7F, 480.0]]", "code 0x7f of mine is nan by its other fields, but 480.0"),
        (E4M3 + "golden = [[0x80, 0.0]]", "code 0x80 of mine is -0.0 by its other fields, but 0.0"),
        (E4M3 + "golden = [[256, 0.0]]", r"golden code 256 is not in \[0, 2\*\*8\)"),
        (E4M3 + "golden = [[1.5, 0.0]]", r"'golden' holds \[1.5, 0.0\]; list pairs"),
        (E4M3 + E4M3, "format 'mine' is defined twice"),
        (INTEGER.replace("5", "40"), "has 40 bits; give 1 to 32"),
        (INTEGER + "fraction_bits = 2", "unknown field 'fraction_bits'"),
        (CODEBOOK.replace("bits = 1", "bits = 2"), "lists 2 values for 2 bits; list 4"),
        (CODEBOOK.replace("0.1", "'a'"), "'values' holds something that is no number"),
        (CODEBOOK.replace("0.1", "1" + "0" * 400), "'values' holds something that is no number"),
        (CODEBOOK.replace("0.1", "1e300"), "lists inf, which is no finite fp32 number"),
        (CODEBOOK.replace("0.1", "-1"), "lists -1.0 twice"),
    ],
)
def test_a_faulty_file_is_one_clear_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(FormatError, match=message) as caught:
        formats.read_format_file(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_the_faulty_table_is_numbered(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"my\.toml, \[\[format\]\] 2: unknown kind 'mystery'"):
        formats.read_format_file(written(tmp_path, E4M3 + INTEGER.replace("integer", "mystery")))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere\.toml: cannot be read \(No such file or directory\)"):
        formats.read_format_file(tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match=r"binary\.toml: is no TOML"):
        formats.read_format_file(tmp_path / "binary.toml")


def test_a_taken_name_or_alias_is_refused(tmp_path: Path, own_catalog: None) -> None:
    def read(name: str, more: str = "") -> formats.Format:
        return formats.read_format_file(written(tmp_path, INTEGER.replace("mine", name) + more))[0]

    with pytest.raises(
        BitwrightError, match=r"'int8' is defined twice: in bitwright\.formats\.definitions\.integers and my\.toml"
    ):
        formats.add(read("int8"), origin="my.toml")
    with pytest.raises(
        FormatError, match=r"'float16', claimed by format 'float16' in my\.toml, already stands for 'fp16'"
    ):
        formats.add(read("float16"), origin="my.toml")
    with pytest.raises(FormatError, match=r"'half', claimed by format 'mine' in my\.toml, already stands for 'fp16'"):
        formats.add(read("mine", 'aliases = ["Half"]'), origin="my.toml")
    with pytest.raises(FormatError, match=r"'bf16', claimed by format 'mine' in my\.toml, already stands for 'bf16'"):
        formats.add(read("mine", 'aliases = ["BF16"]'), origin="my.toml")
    assert "mine" not in formats.names()
