"""ggml's types as codes and scales, against the `gguf` package's dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from bitwright.export.gguf_codes import GGUF_CODES, GgufCodes
from bitwright.quantize.qtensor import QTensor

TYPES = pytest.mark.parametrize("kind", GGUF_CODES.values(), ids=GGUF_CODES.keys())


def random_blocks(kind: GgufCodes, count: int) -> np.ndarray:
    """Blocks of random bytes, but for the fp16 numbers and exponents, which are drawn as ordinary numbers."""
    generator = np.random.default_rng(7)
    stored = generator.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    halves = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": (), "q4_1": (0, 2), "q5_1": (0, 2)}
    for place in halves.get(kind.name, (0, 2) if kind.name in ("q4_k", "q5_k") else (0,)):
        numbers = generator.normal(0, 0.02, (count, 1)).astype("<f2")
        stored[:, place : place + 2] = numbers.view(np.uint8)
    if kind.name == "mxfp4":
        stored[:, 0] = generator.integers(0, 252, count)
    return stored


def values(kind: GgufCodes, stored: np.ndarray) -> np.ndarray:
    """What the codes stand for, by the program's own formula of a scheme."""
    codes, scales, minima = kind.unpack(stored)
    q = QTensor(
        scheme=kind.scheme,
        codes_NK=torch.from_numpy(codes),
        scales_NG=torch.from_numpy(scales),
        offsets_NG=None if minima is None else torch.from_numpy(minima),
    )
    return q.dequantize().numpy()


@TYPES
def test_codes_times_scales_are_what_the_package_dequantises(kind: GgufCodes) -> None:
    stored = random_blocks(kind, 500)
    expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind.name.upper()])
    np.testing.assert_array_equal(values(kind, stored), expected)


@TYPES
def test_sizes_are_those_of_the_package(kind: GgufCodes) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name.upper()]] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize("kind", [kind for kind in GGUF_CODES.values() if kind.pack], ids=lambda kind: kind.name)
def test_bytes_that_were_taken_apart_go_together_again(kind: GgufCodes) -> None:
    assert kind.pack is not None
    stored = random_blocks(kind, 500)
    np.testing.assert_array_equal(kind.pack(*kind.unpack(stored)), stored)
