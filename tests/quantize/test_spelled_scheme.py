"""Schemes without a name: what their facts spell, and back."""

from __future__ import annotations

import pytest

from bitwright.errors import SchemeError, UnknownName
from bitwright.quantize import SCHEMES
from bitwright.quantize.granularity import ROW, TENSOR, block, group
from bitwright.quantize.scheme import Scaling, TensorScheme
from bitwright.quantize.spelled_scheme import read_spelled_scheme, spell_scheme

SPELLED = {
    "int4:g48:bf16": (TensorScheme(format="int4", scaling=Scaling(granularity=group(48), scale_format="bf16")), None),
    "uint4:g128:fp16:zp": (
        TensorScheme(
            format="uint4", scaling=Scaling(granularity=group(128), scale_format="fp16", symmetry="zero_point")
        ),
        None,
    ),
    "uint4:g32:fp32:min": (
        TensorScheme(format="uint4", scaling=Scaling(granularity=group(32), scale_format="fp32", symmetry="minimum")),
        None,
    ),
    "fp4_e2m1:g16:fp8_e4m3:two": (
        TensorScheme(
            format="fp4_e2m1",
            scaling=Scaling(granularity=group(16), scale_format="fp8_e4m3", tensor_scale=True),
        ),
        None,
    ),
    "fp4_e2m1:g32:e8m0": (
        TensorScheme(format="fp4_e2m1", scaling=Scaling(granularity=group(32), scale_format="e8m0", rule="ocp_floor")),
        None,
    ),
    "fp8_e4m3:b128x64:fp32|fp8_e4m3:g64:fp32": (
        TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=block(128, 64), scale_format="fp32")),
        TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=group(64), scale_format="fp32")),
    ),
    "int8:row:bf16|int8:row:fp32": (
        TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="bf16")),
        TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp32")),
    ),
    "bf16:plain": (TensorScheme(format="bf16"), None),
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_name_spells_its_facts(name: str) -> None:
    weights, activations = SPELLED[name]
    found = SCHEMES[name]
    assert (found.weights, found.activations, found.name) == (weights, activations, name)
    assert name in SCHEMES and name not in list(SCHEMES) and not found.in_default_search
    assert spell_scheme(weights, activations) == name


def test_static_inputs_are_spelled() -> None:
    found = SCHEMES["fp8_e4m3:tensor:fp32|fp8_e4m3:tensor:fp32:static"]
    assert found.static_activations and found.activations is not None and found.weights is not None
    assert found.activations.scaling == Scaling(granularity=TENSOR, scale_format="fp32")
    assert spell_scheme(found.weights, found.activations, static=True) == found.name


def test_every_scheme_of_the_catalog_is_spelled_so_that_it_reads_back_but_for_its_rule() -> None:
    for scheme in SCHEMES.values():
        if scheme.weights is None or (scheme.weights.scaling is not None and scheme.weights.scaling.element_exponent):
            continue
        name = spell_scheme(scheme.weights, scheme.activations, static=scheme.static_activations)
        found = read_spelled_scheme(name)
        assert found is not None and found.weights is not None, name
        assert found.weights.stored_bytes(384, 256) == scheme.weights.stored_bytes(384, 256), name
        assert spell_scheme(found.weights, found.activations, static=found.static_activations) == name


@pytest.mark.parametrize(
    "name", ["int4", "int4:g48", "int4:g0:fp16", "int4:48:fp16", "int4:g48:fp16:zp:zp", "int4:g48:fp16|", "as_loaded:"]
)
def test_other_names_spell_nothing(name: str) -> None:
    assert read_spelled_scheme(name) is None
    if name != "int4":
        with pytest.raises(UnknownName, match="unknown scheme"):
            SCHEMES[name]


def test_facts_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SchemeError, match="needs no scale"):
        SCHEMES["fp32:row:fp32"]
    with pytest.raises(UnknownName, match="unknown format 'int9'"):
        SCHEMES["int9:row:fp32"]
