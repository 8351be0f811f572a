"""The torchao folder: a config in the library's own spelling, and codes that its formula turns into the plan's weights.

What the real library makes of it is measured by `benchmarks/engines/torchao_check.py`, in an environment of its own.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_plans import choice, plan_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from bitwright import models
from bitwright.errors import ExportError
from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import find_sites
from bitwright.plan import ModelInfo, Plan
from bitwright.quantize import SCHEMES
from bitwright.quantize.spelled_scheme import spell_scheme

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def loaded(make_tiny_folder: Callable[..., Path]) -> LoadedModel:
    return models.load(make_tiny_folder("llama"))


def plan_for(loaded: LoadedModel, scheme: str) -> Plan:
    sites = [site for site in find_sites(loaded.model) if site.role not in ("embedding", "lm_head")]
    plan = plan_of([choice(site, scheme) for site in sites])
    return plan.replace(model=ModelInfo(name=loaded.name, hash=loaded.hash, params=1))


def record(name: str, version: int, **fields: Any) -> dict[str, Any]:
    """As `config_to_dict` of torchao 0.18 writes one."""
    return {"_type": name, "_version": version, "_data": fields}


def dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def intx(bits: int, sharers: dict[str, Any], mapping: str, scales: str) -> dict[str, Any]:
    return record(
        "IntxWeightOnlyConfig",
        2,
        weight_dtype=dtype(f"int{bits}"),
        granularity=sharers,
        mapping_type={"_type": "MappingType", "_data": mapping},
        scale_dtype=dtype(scales),
    )


#: Scheme → what `config_to_dict` gave for the config that one would write by hand.
CONFIGS = {
    "int4_g32": intx(4, record("PerGroup", 1, group_size=32), "SYMMETRIC", "float16"),
    "int4_g32_zp": intx(4, record("PerGroup", 1, group_size=32), "ASYMMETRIC", "float16"),
    "int8_w": intx(8, record("PerAxis", 1, axis=0), "SYMMETRIC", "float32"),
    "int8": record(
        "Int8DynamicActivationInt8WeightConfig",
        2,
        granularity=record("PerRow", 1, dim=-1),
        set_inductor_config=False,
    ),
    "fp8_w": record(
        "Float8WeightOnlyConfig",
        2,
        weight_dtype=dtype("float8_e4m3fn"),
        granularity=record("PerRow", 1, dim=-1),
        set_inductor_config=False,
    ),
    "fp8": record(
        "Float8DynamicActivationFloat8WeightConfig",
        2,
        granularity=record("PerRow", 1, dim=-1),
        set_inductor_config=False,
    ),
}


@pytest.mark.parametrize("scheme", CONFIGS)
def test_the_config_and_the_codes(scheme: str, loaded: LoadedModel, tmp_path: Path) -> None:
    plan = plan_for(loaded, scheme)
    export(plan, loaded, "torchao", tmp_path / "out", dtype="fp32")
    said = json.loads((tmp_path / "out" / "torchao_config.json").read_text())
    layers = {site.name for site in plan.sites}
    assert said == record("FqnToConfig", 1, fqn_to_config=dict.fromkeys(layers, CONFIGS[scheme]))
    codes = load_file(tmp_path / "out" / "torchao_codes.safetensors")
    weights_alone = SCHEMES[scheme].weights
    assert weights_alone is not None
    planned = apply(plan_for(loaded, spell_scheme(weights_alone)), loaded)
    for layer in layers:
        assert torch.equal(dequantized(codes, layer), planned.get_submodule(layer).weight), layer


def dequantized(codes: dict[str, Tensor], layer: str) -> Tensor:
    """(qdata − zero_point) · scale of the group, as torchao's tensors are read."""
    values, scales = codes[f"{layer}.qdata"].float(), codes[f"{layer}.scale"].float()
    size = values.shape[1] // scales.shape[1]
    zeros = codes.get(f"{layer}.zero_point", torch.zeros_like(scales)).float()
    return (values - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def test_the_folder_is_a_model_of_the_plans_values(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = plan_for(loaded, "int4_g32")
    export(plan, loaded, "torchao", tmp_path / "out", dtype="fp32")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(read(ids).logits, apply(plan, loaded)(ids).logits)


def test_the_loader_is_python_that_names_its_files(loaded: LoadedModel, tmp_path: Path) -> None:
    report = export(plan_for(loaded, "int8"), loaded, "torchao", tmp_path / "out")
    text = (tmp_path / "out" / "load_torchao.py").read_text()
    tree = ast.parse(text)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "load" for node in tree.body)
    assert "torchao_config.json" in text and "torchao_codes.safetensors" in text
    assert any("127.5" in note for note in report.notes)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("int4_g32_min", "torchao has no config for weights uint4 .* minimum with inputs that are not rounded"),
        ("mxfp4", "torchao has no config"),
        ("fp6_w", "torchao has no config for weights fp6_e3m2"),
        ("int4_g128", "torchao refuses groups of 128 in 64 columns"),
    ],
)
def test_refused(scheme: str, message: str, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export(plan_for(loaded, scheme), loaded, "torchao", tmp_path / "out")
    assert not (tmp_path / "out").exists()
