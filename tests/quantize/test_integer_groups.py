"""Integer groups against plain NumPy float32 written from the formulas, and against the gguf package's own Q4_1."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize, quantize


def weights_of(name: str) -> TensorScheme:
    weights = SCHEMES[name].weights
    assert weights is not None
    return weights


def gaussian(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05).astype(np.float32)


def symmetric(group: np.ndarray, bits: int) -> np.ndarray:
    """scale = fp16(amax / (2^(b−1) − 1)), value = clip(round(x / scale)) · scale."""
    top = np.float32(2 ** (bits - 1) - 1)
    scale = (np.abs(group).max() / top).astype(np.float16).astype(np.float32)
    return np.clip(np.rint(group / scale), -top - 1, top) * scale


def zero_point(group: np.ndarray, bits: int) -> np.ndarray:
    """scale = fp16((max − min) / (2^b − 1)), zp = round(−min / scale); (clip(round(x / scale) + zp) − zp) · scale."""
    top = np.float32(2**bits - 1)
    low, high = np.minimum(group.min(), np.float32(0)), np.maximum(group.max(), np.float32(0))
    scale = ((high - low) / top).astype(np.float16).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, top)
    return (np.clip(np.rint(group / scale) + zero, 0, top) - zero) * scale


def minimum(group: np.ndarray, bits: int) -> np.ndarray:
    """scale = fp16((max − min) / (2^b − 1)), offset = fp16(min); clip(round((x − offset) / scale)) · scale + offset."""
    top = np.float32(2**bits - 1)
    scale = ((group.max() - group.min()) / top).astype(np.float16).astype(np.float32)
    offset = group.min().astype(np.float16).astype(np.float32)
    return np.clip(np.rint((group - offset) / scale), 0, top) * scale + offset


def by_groups(x: np.ndarray, size: int, one_group, bits: int) -> np.ndarray:  # type: ignore[no-untyped-def]
    starts = range(0, x.shape[1], size)
    return np.stack([np.concatenate([one_group(row[s : s + size], bits) for s in starts]) for row in x])


@pytest.mark.parametrize("columns", [576, 200, 24])
@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize(
    ("suffix", "one_group"), [("", symmetric), ("_zp", zero_point), ("_min", minimum)], ids=["sym", "zp", "min"]
)
@pytest.mark.parametrize("size", [128, 64, 32])
def test_int4_groups_agree_with_numpy_bit_for_bit(size, suffix, one_group, shift, columns) -> None:  # type: ignore[no-untyped-def]
    x = gaussian(7, columns) + np.float32(shift)
    expected = by_groups(x, size, one_group, bits=4)
    found = fake_quantize(torch.from_numpy(x), weights_of(f"int4_g{size}{suffix}")).numpy()
    assert np.array_equal(found + 0.0, expected + 0.0)  # + 0.0: the formula in floats leaves −0 where an integer has 0


def test_int3_groups_agree_with_numpy_bit_for_bit() -> None:
    x = gaussian(7, 200)
    found = fake_quantize(torch.from_numpy(x), weights_of("int3_g64")).numpy()
    assert np.array_equal(found + 0.0, by_groups(x, 64, symmetric, bits=3) + 0.0)


@pytest.mark.parametrize("side", ["weights", "activations"])
def test_int8_rows_agree_with_numpy_bit_for_bit(side: str) -> None:
    x = gaussian(9, 300)
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    expected = np.clip(np.rint(x / scale), -128, 127) * scale
    found = fake_quantize(torch.from_numpy(x), getattr(SCHEMES["int8"], side)).numpy()
    assert np.array_equal(found + 0.0, expected + 0.0)


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, 6.5, -7.0]])
    assert fake_quantize(x, weights_of("int4_g128")).tolist() == [[7.0, 0.0, 2.0, 2.0, 0.0, -2.0, 6.0, -7.0]]


def test_round_to_nearest_never_uses_the_lowest_symmetric_code() -> None:
    codes = quantize(torch.from_numpy(gaussian(50, 512)), weights_of("int4_g32")).codes_NK
    assert codes.min() == -7 and codes.max() == 7


# --- GGUF -------------------------------------------------------------------------------------------------------------


def q4_1_values(weights: np.ndarray) -> np.ndarray:
    """Through the gguf package and back: what a Q4_1 file gives for these weights."""
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    return gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("std", [0.001, 0.05, 3.0])
def test_values_of_a_q4_1_file_come_back_exactly(std: float, shift: float) -> None:
    weights = (np.random.default_rng(1).standard_normal((64, 256)) * std + shift * std).astype(np.float32)
    values = q4_1_values(weights)
    found = fake_quantize(torch.from_numpy(values), weights_of("int4_g32_min")).numpy()
    assert np.array_equal(found, values)


def test_a_minimum_much_smaller_than_the_range_comes_back_exactly() -> None:
    """−max/2 + max/2 in fp32 would lose a small minimum beside a large maximum."""
    rng = np.random.default_rng(2)
    scale = rng.uniform(0.05, 0.2, (500, 1)).astype(np.float16).astype(np.float32)
    offset = (
        (rng.choice([-1, 1], (500, 1)) * 10.0 ** rng.uniform(-7, -2, (500, 1))).astype(np.float16).astype(np.float32)
    )
    codes = rng.integers(0, 16, (500, 32)).astype(np.float32)
    codes[:, 3], codes[:, 20] = 0, 15
    values = codes * scale + offset
    q = quantize(torch.from_numpy(values), weights_of("int4_g32_min"))
    assert q.offsets_NG is not None
    assert np.array_equal(q.offsets_NG.numpy(), offset)
    assert np.array_equal(q.dequantize().numpy(), values)


def test_a_zero_point_cannot_reproduce_a_floating_minimum() -> None:
    values = q4_1_values(gaussian(16, 256))
    found = fake_quantize(torch.from_numpy(values), weights_of("int4_g32_zp")).numpy()
    assert not np.array_equal(found, values)


def test_error_is_that_of_the_gguf_package() -> None:
    """gguf codes against the unrounded scale, we against the stored one: the errors are as good as equal."""
    weights = gaussian(64, 512)
    theirs = np.square(q4_1_values(weights) - weights).mean()
    ours = np.square(fake_quantize(torch.from_numpy(weights), weights_of("int4_g32_min")).numpy() - weights).mean()
    assert ours == pytest.approx(theirs, rel=0.01)
