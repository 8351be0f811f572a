"""Block formats from a TOML file: as their records say, elements of the same file included, and every way to err."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import BitwrightError
from bitwright.formats import BlockFormat

BLOCK = """
[[format]]
name = "mine"
kind = "block"
element = "fp8_e4m3"
block_size = 32
scale_format = "e8m0"
scale_rule = "ocp_floor"
source = "a test"
"""
MANTISSA_5 = """
[[format]]
name = "mantissa5"
kind = "integer"
bits = 5
source = "a test"
"""


@pytest.fixture
def catalogs_are_restored() -> Iterator[None]:
    before = [(catalog, set(catalog)) for catalog in (formats.FORMATS, formats.BLOCK_FORMATS)]
    yield
    for catalog, names in before:
        for name in set(catalog) - names:
            del catalog._records[name]
            del catalog._origins[name]


def read(folder: Path, text: str) -> list:
    path = folder / "my.toml"
    path.write_text(text, encoding="utf-8")
    return list(formats.read_format_file(path))


def gaussian() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((4, 70)).astype(np.float32)


def test_a_block_format_of_known_elements(tmp_path: Path) -> None:
    (mine,) = read(tmp_path, BLOCK)
    assert isinstance(mine, BlockFormat)
    assert np.array_equal(mine.decode(mine.encode(gaussian())), formats.round("mxfp8", gaussian()))


def test_elements_of_a_table_above(tmp_path: Path) -> None:
    text = BLOCK.replace("fp8_e4m3", "mantissa5").replace("= 32", "= 16") + "element_exponent = -3\n"
    _, mine = read(tmp_path, MANTISSA_5 + text)
    bfp = formats.block_floating_point(block_size=16, mantissa_bits=5)
    assert np.array_equal(mine.decode(mine.encode(gaussian())), bfp.decode(bfp.encode(gaussian())))


def test_two_levels_of_scales(tmp_path: Path) -> None:
    text = BLOCK.replace("fp8_e4m3", "fp4_e2m1").replace("= 32", "= 16").replace("e8m0", "fp8_e4m3")
    (mine,) = read(tmp_path, text.replace("ocp_floor", "amax") + "tensor_scale = true\n")
    assert np.array_equal(mine.decode(mine.encode(gaussian())), formats.round("nvfp4", gaussian()))


@pytest.mark.usefixtures("catalogs_are_restored")
def test_added_block_formats_go_by_their_names(tmp_path: Path) -> None:
    (mine,) = read(tmp_path, BLOCK + 'aliases = ["Ours"]\n')
    formats.add(mine, origin="my.toml")
    assert "mine" in formats.block_names() and formats.get("mine") is mine and formats.resolve("OURS") == "mine"
    assert np.array_equal(formats.round("mine", gaussian()), formats.round("mxfp8", gaussian()))
    assert "mine" in {row.name for row in formats.block_rows()}
    (twin,) = read(tmp_path, BLOCK)
    with pytest.raises(BitwrightError, match=r"'mine' is defined twice: in my\.toml and other\.toml"):
        formats.add(twin, origin="other.toml")


@pytest.mark.parametrize(("name", "taken"), [("fp8_e4m3", "fp8_e4m3"), ("mxfp8", "mxfp8"), ("mxfp4_e2m1", "mxfp4")])
def test_names_of_either_kind_are_not_taken_again(name: str, taken: str, tmp_path: Path) -> None:
    (mine,) = read(tmp_path, BLOCK.replace("mine", name))
    with pytest.raises(BitwrightError, match=rf"'{name}'.*({taken}|defined twice)"):
        formats.add(mine)
    (scalar,) = read(tmp_path, MANTISSA_5.replace("mantissa5", name))
    with pytest.raises(BitwrightError, match=rf"'{name}'.*({taken}|defined twice)"):
        formats.add(scalar)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fp8_e4m3"', '"fp8_e4m33"', r"'element' names the unknown format 'fp8_e4m33'; did you mean 'fp8_e4m3'"),
        ('"fp8_e4m3"', '"mxfp8"', "'element' names the unknown format 'mxfp8'"),
        ('"fp8_e4m3"', '"mine"', "'element' names the unknown format 'mine'"),
        ('"e8m0"', '"int8"', "'scale_format' is int8; scales are floats"),
        ('"e8m0"', '"fp6_e3m2"', "fp6_e3m2, which has no NaN"),
        ("= 32", "= 0", "blocks of 0 values"),
        ("= 32", "= 32.0", "'block_size' is 32.0; give a whole number"),
        ("block_size = 32", "", "'block_size' is missing"),
        # Another field that belongs there is no misspelling of the missing one.
        ('scale_format = "e8m0"', "", r"'scale_format' is missing\.$"),
        ('scale_rule = "ocp_floor"', "", r"'scale_rule' is missing\.$"),
        ("block_size", "blocksize", "'block_size' is missing; did you mean 'blocksize'"),
        ('"ocp_floor"', '"ocp"', "unknown scale rule 'ocp'"),
        ('source = "a test"', "", "'source' is missing"),
        ('source = "a test"', 'source = "a test"\ngolden = []', "unknown field 'golden'"),
    ],
)
def test_wrong_block_formats_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in BLOCK
    with pytest.raises(BitwrightError, match=message) as refused:
        read(tmp_path, BLOCK.replace(old, new))
    assert "my.toml, [[format]] 1" in str(refused.value)
