"""The recipe files, against the recipe classes of transformer_engine 2.20.2: their fields and what their checks demand.

The package needs a GPU to be built; its recipe module needs pydantic only. Its classes are copied here as names, fields
and defaults, from the documentation in transformer_engine/common/recipe/__init__.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import field, make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_plans import choice, plan_of

from bitwright import models
from bitwright.errors import ExportError
from bitwright.export import export
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import find_sites
from bitwright.plan import ModelInfo, Plan

Format = Enum("Format", ["E4M3", "E5M2", "E2M1", "HYBRID"])
#: Class → field → default.
DOCUMENTED: dict[str, dict[str, Any]] = {
    "Float8CurrentScaling": {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    "MXFP8BlockScaling": {
        "margin": 0,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    },
    "Float8BlockScaling": {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    "NVFP4BlockScaling": {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}


@pytest.fixture
def recipe_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for transformer_engine.common.recipe with the documented classes."""
    module = ModuleType("transformer_engine.common.recipe")
    module.Format = Format  # type: ignore[attr-defined]
    for name, fields in DOCUMENTED.items():
        made = make_dataclass(name, [(key, Any, field(default=value)) for key, value in fields.items()])
        setattr(module, name, made)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture(scope="module")
def loaded(make_tiny_folder: Callable[..., Path]) -> LoadedModel:
    return models.load(make_tiny_folder("llama"))


def plan_for(loaded: LoadedModel, scheme: Any, **changes: Any) -> Plan:
    sites = [site for site in find_sites(loaded.model) if site.role not in ("embedding", "lm_head")]
    plan = plan_of([choice(s, scheme(s) if callable(scheme) else scheme, **changes) for s in sites])
    return plan.replace(model=ModelInfo(name=loaded.name, hash=loaded.hash, params=1))


def run(folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile((folder / "te_recipe.py").read_text(), "te_recipe.py", "exec"), names)
    return names


TENSOR = "fp8_e4m3:tensor:fp32|fp8_e4m3:tensor:fp32"


def test_every_layer_has_its_recipe(loaded: LoadedModel, recipe_module: Any, tmp_path: Path) -> None:
    schemes = {"attn.q": "nvfp4", "attn.out": "mxfp8", "mlp.down": "bf16"}
    plan = plan_for(loaded, lambda site: schemes.get(site.role, TENSOR))
    report = export(plan, loaded, "transformer-engine", tmp_path / "out")
    names, said = run(tmp_path / "out"), json.loads((tmp_path / "out" / "te_recipe.json").read_text())
    assert names["LAYERS"] == said["layers"] and said["model"]["hash"] == loaded.hash
    assert names["LAYERS"].keys() == {site.module for site in find_sites(loaded.model)}
    of = names["recipe_of"]
    up = of("model.layers.0.mlp.up_proj")
    assert isinstance(up, recipe_module.Float8CurrentScaling)
    assert (up.fp8_format, up.use_power_2_scales) == (Format.E4M3, False)
    assert isinstance(of("model.layers.1.self_attn.o_proj"), recipe_module.MXFP8BlockScaling)
    q = of("model.layers.1.self_attn.q_proj")
    assert isinstance(q, recipe_module.NVFP4BlockScaling)
    assert q.disable_rht and q.disable_stochastic_rounding and q.disable_2d_quantization
    assert of("model.layers.0.mlp.down_proj") is None and of("lm_head") is None
    for recipe in said["recipes"].values():
        assert recipe["fields"].keys() <= DOCUMENTED[recipe["class"]].keys()
    assert any("rounds scales up" in note and "o_proj" in note for note in report.notes)


@pytest.mark.parametrize(
    ("scheme", "fp32"), [("fp8_block", False), ("fp8_e4m3:b128x128:fp32|fp8_e4m3:g128:fp32", True)]
)
def test_blocks_say_what_their_scales_are(scheme: str, fp32: bool, recipe_module: Any, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from bitwright.models.loaded import from_memory

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    model = from_memory(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), None, name="wide")
    export(plan_for(model, scheme), model, "transformer-engine", tmp_path / "out")
    recipe = run(tmp_path / "out")["recipe_of"]("model.layers.0.mlp.down_proj")
    assert isinstance(recipe, recipe_module.Float8BlockScaling) and recipe.use_f32_scales is fp32
    assert (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim) == (1, 2)


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        ("fp8", {}, "no recipe for weights fp8_e4m3 per row"),
        ("int4_g32", {}, "no recipe for weights int4 .* that are not rounded"),
        ("fp8_block", {}, "multiples of 128 and columns of 128, not 64 × 64"),
        (TENSOR, {"rounding": "gptq"}, "takes no codes of gptq"),
        (TENSOR, {"transform": "smoothquant"}, "changes no inputs, which smoothquant needs"),
    ],
)
def test_refused(scheme: str, changes: Any, message: str, loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export(plan_for(loaded, scheme, **changes), loaded, "transformer-engine", tmp_path / "out")
    assert not (tmp_path / "out").exists()
