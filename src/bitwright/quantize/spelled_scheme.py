"""A scheme by its facts, where it has no name: codes that somebody else's checkpoint holds, or one tried on the spot.

    int4:g48:bf16                                   format of the codes : who shares a scale : format of the scales
    uint4:g128:bf16:zp                              zp: an integer zero point; min: a floating minimum
    fp4_e2m1:g16:fp8_e4m3:two                       two: levels of scales, as NVFP4 has them
    fp8_e4m3:b128x128:fp32|fp8_e4m3:g128:fp32       weights | inputs, whose scales are found on every call
    fp8_e4m3:tensor:fp32|fp8_e4m3:tensor:fp32:static
    bf16:plain                                      stored as they are

Who shares a scale is `tensor`, `row`, `g` and a number of columns, or `b` and rows x columns. How scales are found is
no part of a name: by the largest magnitude, and powers of two as OCP MX finds them. A checkpoint's were found already.

    SCHEMES["uint4:g128:bf16:zp"]                   is a scheme like any other; `spell_scheme` gives its name back

Rejected: a preset for each of them (formats × groups × scales × zero points are hundreds, of which a model has one or
two); facts as fields of a plan's sites (every reader would know two ways to say what a scheme is).
"""

from __future__ import annotations

import re
from functools import cache

from bitwright.quantize.granularity import Granularity, block, group
from bitwright.quantize.scheme import Scaling, Scheme, Symmetry, TensorScheme

_SYMMETRIES: dict[str, Symmetry] = {"zp": "zero_point", "min": "minimum"}
_TWO_LEVELS, _STATIC, _PLAIN = "two", "static", "plain"
_SHARERS = re.compile(r"(?P<scope>tensor|row)|g(?P<group>[1-9]\d*)|b(?P<rows>[1-9]\d*)x(?P<columns>[1-9]\d*)")


def spell_scheme(weights: TensorScheme, activations: TensorScheme | None = None, *, static: bool = False) -> str:
    """The name of a scheme with these facts; rules by which scales are found are left out."""
    if activations is None:
        return _spell(weights)
    return f"{_spell(weights)}|{_spell(activations)}{f':{_STATIC}' if static else ''}"


@cache
def read_spelled_scheme(name: str) -> Scheme | None:
    """The scheme that a name spells out, or None where it spells none.

    Raises:
        SchemeError: facts that contradict each other.
        UnknownName: a format that no catalog has.
    """
    of_weights, bar, of_inputs = name.partition("|")
    weights = _read(of_weights)
    inputs = _read(of_inputs.removesuffix(f":{_STATIC}")) if bar else None
    if weights is None or (bar and inputs is None):
        return None
    rest = "activations untouched" if inputs is None else f"activations {inputs}"
    return Scheme(
        name=name,
        description=f"weights {weights}; {rest}",
        source="spelled out",
        weights=weights,
        activations=inputs,
        static_activations=of_inputs.endswith(f":{_STATIC}"),
        in_default_search=False,
    )


def _spell(scheme: TensorScheme) -> str:
    scaling = scheme.scaling
    if scaling is None:
        return f"{scheme.format}:{_PLAIN}"
    granularity = scaling.granularity
    sharers = {
        "group": f"g{granularity.group_size}",
        "block": f"b{granularity.block_rows}x{granularity.group_size}",
    }.get(granularity.scope, granularity.scope)
    words = [scheme.format, sharers, scaling.scale_format]
    words += [word for word, symmetry in _SYMMETRIES.items() if symmetry == scaling.symmetry]
    return ":".join([*words, _TWO_LEVELS] if scaling.tensor_scale else words)


def _read(text: str) -> TensorScheme | None:
    match text.split(":"):
        case [number, word] if word == _PLAIN:
            return TensorScheme(format=number)
        case [number, sharers, scales, *rest] if (found := _SHARERS.fullmatch(sharers)) and _is_known(rest):
            symmetries = [_SYMMETRIES[word] for word in rest if word in _SYMMETRIES]
            scaling = Scaling(
                granularity=_granularity(found),
                scale_format=scales,
                rule="ocp_floor" if scales == "e8m0" else "amax",
                symmetry=symmetries[0] if symmetries else "symmetric",
                tensor_scale=_TWO_LEVELS in rest,
            )
            return TensorScheme(format=number, scaling=scaling)
    return None


def _is_known(rest: list[str]) -> bool:
    """Whether the last words are nothing, a symmetry, or the word for two levels."""
    return len(rest) <= 1 and set(rest) <= {*_SYMMETRIES, _TWO_LEVELS}


def _granularity(found: re.Match[str]) -> Granularity:
    if found["scope"] is not None:
        return Granularity(scope="tensor" if found["scope"] == "tensor" else "row")
    if found["group"] is not None:
        return group(int(found["group"]))
    return block(int(found["rows"]), int(found["columns"]))
