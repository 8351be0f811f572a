"""Laws of value schemes: what a record may say, what rounding does to a head, a token, a channel, and to nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize import VALUE_SCHEMES, TensorScheme, ValueScheme
from bitwright.quantize.granularity import ROW, TENSOR
from bitwright.quantize.scheme import Scaling
from bitwright.quantize.value_rounding import round_values, static_scale

SCHEMES = sorted(VALUE_SCHEMES)
ROLES = {
    "attn.qk",
    "attn.softmax",
    "attn.softmax_sum",
    "attn.pv",
    "attn.output",
    "kv_cache",
    "mlp.up",
    "mlp.act",
    "mlp.down",
    "norm",
    "residual",
    "router",
}


def values(seed: int = 0) -> torch.Tensor:
    """[2 texts, 3 heads, 64 tokens, 32]: heads of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 64, 32, generator=draw) * torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)


def scale_of(scheme: ValueScheme, x: torch.Tensor) -> torch.Tensor | None:
    return static_scale(scheme, "k", x.abs().amax((0, 2, 3))) if scheme.static else None


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_says_where_it_belongs(name: str) -> None:
    scheme = VALUE_SCHEMES[name]
    assert scheme.roles and scheme.roles <= ROLES
    assert scheme.source and scheme.description
    assert scheme.values.nominal_bits <= scheme.stored_bits(64) <= scheme.values.nominal_bits + 1


@pytest.mark.parametrize("name", SCHEMES)
def test_rounded_values_lie_near_the_values(name: str) -> None:
    scheme, x = VALUE_SCHEMES[name], values()
    rounded = round_values(x, scheme, scale_of(scheme, x))
    assert rounded.shape == x.shape and rounded.dtype == x.dtype
    # a head's largest value is at most half a step of four bits away, wherever the scale is not shared by all heads
    shared = scheme.static and scheme.axis == "tensor"
    for head in range(3):
        error, size = (rounded - x)[:, head].abs().max(), x[:, head].abs().max()
        assert float(error) <= float(x.abs().max() if shared else size) / 12


@pytest.mark.parametrize("name", [name for name in SCHEMES if VALUE_SCHEMES[name].axis != "channel"])
def test_tokens_are_rounded_by_themselves(name: str) -> None:
    scheme, x = VALUE_SCHEMES[name], values()
    scale = scale_of(scheme, x)
    whole = round_values(x, scheme, scale)
    for token in (0, 17, 63):
        assert torch.equal(round_values(x[:, :, token : token + 1], scheme, scale), whole[:, :, token : token + 1])
    assert torch.equal(round_values(x[1:], scheme, scale), whole[1:])


def test_one_scale_for_each_head() -> None:
    scheme, x = VALUE_SCHEMES["int8_head"], values()
    scale = static_scale(scheme, "k", x.abs().amax((0, 2, 3)))
    expected = torch.stack([(x[:, h] / scale[h]).round().clamp(-128, 127) * scale[h] for h in range(3)], dim=1)
    assert torch.equal(round_values(x, scheme, scale), expected)
    assert bool((round_values(x * 10, scheme, scale).abs() <= scale.view(3, 1, 1) * 128).all())  # saturates


def test_fp8_as_torch_casts_it() -> None:
    scheme, x = VALUE_SCHEMES["fp8_e4m3_token"], values()
    scale = x.abs().amax(-1, keepdim=True) / 448
    assert torch.equal(round_values(x, scheme), (x / scale).to(torch.float8_e4m3fn).float() * scale)


def test_probabilities_fill_the_format() -> None:
    p = torch.rand(1, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    p[..., 0] = 1.0
    for name in ("fp8_e4m3_unit", "fp8_e5m2_unit", "int8_unit"):
        scheme = VALUE_SCHEMES[name]
        scale = static_scale(scheme, "p", torch.tensor([0.3]))  # what calibration saw does not matter
        largest = float(formats.FORMATS[scheme.values.format].max)
        assert scale.tolist() == [float(torch.tensor(1.0) / torch.tensor(largest))]
        rounded = round_values(p, scheme, scale)
        torch.testing.assert_close(rounded[..., 0], torch.ones(1, 2, 5), rtol=1e-6, atol=0)
        assert float((rounded - p).abs().max()) <= 0.5 / 7 + 1e-6  # half a step of E5M2 below 1.75, which stands for 1


def test_a_group_that_is_not_full_stays() -> None:
    scheme, x = VALUE_SCHEMES["int4_channel_g32"], values()
    rounded = round_values(x[:, :, :50], scheme)
    assert torch.equal(rounded[:, :, 32:], x[:, :, 32:50])
    assert torch.equal(rounded[:, :, :32], round_values(x[:, :, :32], scheme))
    assert torch.equal(round_values(x[:, :, :31], scheme), x[:, :, :31])


def test_nothing_is_rounded_to_nothing() -> None:
    empty = torch.empty(2, 3, 0, 32)
    assert all(round_values(empty, VALUE_SCHEMES[name]).shape == empty.shape for name in SCHEMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": "row"}, "unknown axis 'row'"),
        ({"axis": "token", "static": True}, "those per token or channel dynamic"),
        ({"axis": "head"}, "scales per tensor or head are static"),
        ({"axis": "head", "static": True}, "give it TENSOR"),
        ({"axis": "channel"}, "says how many tokens share a scale"),
        (
            {
                "axis": "head",
                "static": True,
                "values": TensorScheme(
                    format="int8", scaling=Scaling(granularity=TENSOR, scale_format="fp32", rule="mse")
                ),
            },
            "must be symmetric, one level, by amax",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {
        "name": "x",
        "description": "x",
        "source": "x",
        "values": TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp32")),
        "axis": "token",
        "static": False,
        "roles": frozenset({"kv_cache"}),
    }
    with pytest.raises(SchemeError, match=message):
        ValueScheme(**facts | changes)


def test_a_truncating_cast_takes_the_neighbour_nearer_to_zero() -> None:
    """As vLLM's kernels for CPUs: sign, exponent and the first three bits, subnormals too."""
    scheme, scale = VALUE_SCHEMES["fp8_e4m3_tensor_truncated"], torch.tensor([0.25])
    exponents = torch.randint(-13, 9, (1, 1, 50, 40), generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 1, 50, 40, generator=torch.Generator().manual_seed(1)) * 2.0**exponents
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scale
    places = torch.searchsorted(grid, x.abs(), right=True) - 1
    assert torch.equal(round_values(x, scheme, scale), grid[places] * x.sign())
    beyond = torch.tensor([[[[448.0, 500.0, -1e6, 447.9]]]]) * 0.25
    assert round_values(beyond, scheme, scale).flatten().tolist() == [112.0, 112.0, -112.0, 104.0]


def test_values_are_rounded_alike_on_every_call() -> None:
    with pytest.raises(SchemeError, match="give it a mode without random bits"):
        replace(VALUE_SCHEMES["fp8_e4m3_tensor"], rounding="stochastic")
