"""What the verbs and the records refuse: always one sentence with the value, the rule and the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from galleries import same_bits

from bitwright import formats
from bitwright.errors import FormatError, SchemeError, UnknownName
from bitwright.quantize import SCHEMES, Scaling, TensorScheme, fake_quantize, group, pack, quantize
from bitwright.quantize.granularity import ROW

MXFP4 = SCHEMES["mxfp4"].weights
assert MXFP4 is not None
FP8 = TensorScheme(format="fp8_e4m3")
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("verb", [fake_quantize, quantize, pack])
@pytest.mark.parametrize("scheme", [SCHEMES["mxfp4"], "mxfp4", None], ids=lambda scheme: type(scheme).__name__)
def test_what_is_no_tensor_scheme(verb: Any, scheme: Any) -> None:
    with pytest.raises(SchemeError, match=r"SCHEMES\['mxfp4'\]\.weights"):
        verb(X, scheme)


@pytest.mark.parametrize("verb", [fake_quantize, quantize, pack])
def test_what_is_no_tensor(verb: Any) -> None:
    with pytest.raises(SchemeError, match=r"ndarray, no tensor.*torch\.from_numpy"):
        verb(X.numpy(), MXFP4)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, "a"])
def test_seeds_out_of_range(seed: Any) -> None:
    with pytest.raises(SchemeError, match=r"whole number in \[0, 2\*\*64\)"):
        fake_quantize(X, FP8, rounding="stochastic", seed=seed)


@pytest.mark.parametrize("random_bits", [0, 33, 8.0])
def test_random_bits_out_of_range(random_bits: Any) -> None:
    with pytest.raises(SchemeError, match="from 1 to 32"):
        fake_quantize(X, FP8, rounding="stochastic", seed=0, random_bits=random_bits)


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match="unknown rounding None"):
        fake_quantize(X, FP8, rounding=None)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="did you mean 'saturate'"):
        fake_quantize(X, FP8, overflow="saturating")
    with pytest.raises(SchemeError, match="codes under a scale always saturate"):
        fake_quantize(X, MXFP4, overflow="saturate")  # type: ignore[arg-type]


def test_scales_of_another_kind() -> None:
    with pytest.raises(SchemeError, match="scales are of type Tensor; pass Scales"):
        quantize(X, MXFP4, scales=torch.ones(8, 2, 1))  # type: ignore[arg-type]


def test_out_and_gradients() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(SchemeError, match="would lose"):
        fake_quantize(x, MXFP4, out=torch.empty_like(X))  # type: ignore[arg-type]
    with torch.no_grad():
        assert fake_quantize(x, MXFP4, out=torch.empty_like(X)).shape == X.shape  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", [MXFP4, FP8], ids=str)
def test_out_that_overlaps_x(scheme: TensorScheme) -> None:
    memory = torch.randn(9 * 64)
    x, beside = memory[: 8 * 64].view(8, 64), memory[64:].view(8, 64)
    with pytest.raises(SchemeError, match="64 elements beside x"):
        fake_quantize(x, scheme, out=beside)
    expected = fake_quantize(x, scheme)
    assert fake_quantize(x, scheme, out=x) is x and same_bits(x, expected)


def test_schemes_that_make_no_sense() -> None:
    scaling = Scaling(granularity=group(32), scale_format="fp16")
    with pytest.raises(SchemeError, match=r"block_scheme\('mxfp4'\)"):
        TensorScheme(format="mxfp4")
    with pytest.raises(UnknownName, match="did you mean"):
        TensorScheme(format="fp8_e4m")
    for name in ("fp32", "fp64"):
        with pytest.raises(SchemeError, match="needs no scale"):
            TensorScheme(format=name, scaling=scaling)
    with pytest.raises(SchemeError, match="stored as floats, not as int8"):
        Scaling(granularity=ROW, scale_format="int8")
    with pytest.raises(SchemeError, match="unknown symmetry 'odd'"):
        Scaling(granularity=ROW, scale_format="fp16", symmetry="odd")  # type: ignore[arg-type]


def test_named_overflow_rules_on_tensors() -> None:
    x = torch.tensor([500.0, -500.0, torch.inf, 448.0])
    assert fake_quantize(x, FP8, overflow="torch").tolist() == x.to(torch.float8_e4m3fn).float().tolist()
    assert fake_quantize(x, FP8, overflow="saturate").tolist() == [448.0, -448.0, 448.0, 448.0]
    assert fake_quantize(x, FP8)[:3].isnan().all()


@pytest.mark.parametrize("scheme", [MXFP4, FP8], ids=str)
def test_one_random_bit_takes_both_neighbours_of_a_middle(scheme: TensorScheme) -> None:
    """With one bit a number a quarter of the way never steps up, and one in the middle does so half the time."""
    x = torch.full((64, 64), 1.0625 if scheme is FP8 else 1.25)
    x[:, ::32] = 6.0  # the scale of every block is 1
    quarter = x.clone()
    quarter[x != 6.0] = 1.03125 if scheme is FP8 else 1.125
    drawn = fake_quantize(x, scheme, rounding="stochastic", seed=3, random_bits=1)[x != 6.0]
    assert 0.45 < (drawn > 1.0).float().mean() < 0.55
    kept = fake_quantize(quarter, scheme, rounding="stochastic", seed=3, random_bits=1)[x != 6.0]
    assert (kept == 1.0).all()


@pytest.mark.parametrize("number", [2**60 + 1, np.int64(2**53 + 1), np.uint64(2**63), [2**53 + 1, 1]])
def test_integers_beyond_float64(number: Any) -> None:
    with pytest.raises(FormatError, match=r"limit 2\*\*53"):
        formats.round("bf16", number)


@pytest.mark.parametrize(
    "values", [torch.ones(3, dtype=torch.bfloat16), torch.ones(3, requires_grad=True), [[1.0], [1.0, 2.0]]], ids=repr
)
def test_what_numpy_cannot_read(values: Any) -> None:
    with pytest.raises(FormatError, match="NumPy cannot read"):
        formats.round("fp8_e4m3", values)


def test_formats_asked_for_by_what_is_no_name() -> None:
    with pytest.raises(UnknownName, match="unknown format 3"):
        formats.get(3)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="BlockCodes"):
        formats.decode("mxfp4", np.zeros(18))
