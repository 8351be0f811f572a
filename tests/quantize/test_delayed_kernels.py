"""What one read of a tensor gives under a scale that is known: a transcription in NumPy's float32, for every backend.

Transformer Engine multiplies by the scale, casts with saturation, and multiplies by the reciprocal of the scale; amax
is that of the tensor before it is scaled. The cast is `formats.round`, which others judge.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType

import numpy as np
import pytest
import torch
from galleries import MATRICES, finite, gaussian, same_bits, spoiled
from torch import Tensor

from bitwright import formats
from bitwright.quantize import DelayedScaling

F32 = np.float32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One of each kind: floats with one zero and with two, at the width of fp32's exponents, integers, codebooks.
FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp4_e2m1", "bf16", "int8", "uint4", "nf4")
#: On codes and ties; anywhere; the ends of fp32, where the reciprocal is subnormal, or the number itself is.
INV_SCALES = (1.0, 448 / 3, 3.4028234663852886e38, 1e-38)


@pytest.fixture(params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(f"bitwright.quantize.backends.{request.param}")


def transcribed(x: Tensor, format_name: str, inv_scale: float) -> tuple[Tensor, Tensor]:
    """Values in the dtype of `x`, and amax."""
    wide, inverse = x.float().numpy(), F32(inv_scale)
    with np.errstate(all="ignore"):
        scaled = wide * inverse
        is_nan = np.isnan(scaled)
        codes = formats.round(format_name, np.where(is_nan, 0, scaled)).astype(F32)
        values = np.where(is_nan, F32(math.nan), codes) * (F32(1) / inverse)
        narrow = torch.from_numpy(np.asarray(values)).to(x.dtype)
    return narrow, torch.tensor(np.abs(wide).max(initial=0), dtype=torch.float32)


def assert_transcribed(backend: ModuleType, x: Tensor, format_name: str, inv_scale: float) -> None:
    number = formats.FORMATS[format_name]
    reason = backend.why_not_delayed(number, x.dtype)
    if reason is not None:
        assert str(x.dtype) in reason  # the formats are known to all
        return
    before = x.clone()
    values, amax = backend.scale_with_amax(x, number, torch.tensor(inv_scale))
    expected, expected_amax = transcribed(x, format_name, inv_scale)
    assert same_bits(values, expected), (format_name, x.dtype, inv_scale)
    assert same_bits(amax, expected_amax), (format_name, x.dtype, amax, expected_amax)
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_values_and_amax_of_matrices(backend: ModuleType, format_name: str, dtype: torch.dtype) -> None:
    for matrix in MATRICES.values():
        for inv_scale in INV_SCALES:
            assert_transcribed(backend, matrix().to(dtype), format_name, inv_scale)


def test_a_reciprocal_beyond_fp32_is_infinite(backend: ModuleType) -> None:
    """As NumPy and torch divide: codes are ±0, and ±0 · Inf is NaN."""
    assert_transcribed(backend, finite(), "fp8_e4m3", 1e-40)


def test_fp32_and_bf16_are_for_every_backend(backend: ModuleType) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert all(backend.why_not_delayed(formats.FORMATS[name], dtype) is None for name in FORMATS)
    assert "float64" in backend.why_not_delayed(formats.FORMATS["fp8_e4m3"], torch.float64)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.75, 2.0**-149, math.inf, -math.inf, math.nan])
def test_one_value_anywhere_is_seen(backend: ModuleType, value: float) -> None:
    for x in (torch.tensor(value), torch.zeros(0), torch.full((3, 67), 0.25), torch.full((2, 3, 0), 1.0)):
        for place in (0, -1):
            given = x.clone()
            given.view(-1)[place : place + 1 or None] = value
            assert_transcribed(backend, given, "fp8_e4m3", 448 / 1.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_thread_is_heard(backend: ModuleType, dtype: torch.dtype) -> None:
    """Numbers enough for several threads, the largest one last, then first; NaN in the middle."""
    x = gaussian(66, 1024, seed=6).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for place, value in ((-1, 77.0), (0, -99.0), (x.numel() // 2, math.nan)):
            x.view(-1)[place] = value
            assert_transcribed(backend, x, "fp8_e4m3", 448 / 77)
    finally:
        torch.set_num_threads(threads)


def test_memory_that_is_given_is_written(backend: ModuleType) -> None:
    number, inv_scale = formats.FORMATS["fp8_e5m2"], torch.tensor([3.0, 0.3])[1]
    for dtype in (torch.float32, torch.bfloat16):
        x = finite().to(dtype)
        expected, _ = transcribed(x, "fp8_e5m2", 0.3)
        for out in (torch.zeros_like(x), torch.zeros(x.shape[::-1], dtype=dtype).T, x):
            values, _ = backend.scale_with_amax(x, number, inv_scale, out=out)
            assert values is out and same_bits(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format_name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_step_uses_the_scale_of_the_steps_before(format_name: str, dtype: torch.dtype) -> None:
    """Growing tensors of a training run, one of them not finite: the scale lags by a step."""
    state = DelayedScaling(format_name, history_length=2, amax_choice="most_recent")
    largest, inv_scale = F32(formats.FORMATS[format_name].max), F32(1)
    for step in range(6):
        x = (spoiled() if step == 3 else gaussian(6, 70, seed=step) * 3.0**step).to(dtype)
        expected, amax = transcribed(x, format_name, float(inv_scale))
        assert same_bits(state.fake_quantize(x), expected)
        state.update()
        if math.isfinite(amax.item()):
            inv_scale = largest / F32(amax.item())
        assert state.inv_scale.item() == inv_scale


def test_gradients_reach_neither_the_history_nor_the_scale() -> None:
    state = DelayedScaling("fp8_e4m3")
    state.fake_quantize(gaussian(4, 70).bfloat16().requires_grad_())
    state.update()
    assert not state.history.requires_grad and not state.inv_scale.requires_grad
