"""Folders for TensorRT-LLM, read back as ModelOpt lays them out."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import PROMPT, planned, small_model, stored_json, stored_tensors, uniform
from small_plans import choice, plan_of

from bitwright.errors import ExportError
from bitwright.export import export, share_tensor_scales
from bitwright.inference import apply, calibrate_static
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Plan

#: A python with ModelOpt.
READER = os.environ.get("BITWRIGHT_MODELOPT_PYTHON")
NAME = "model.layers.1.mlp.down_proj"
FOURS = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


def test_fp8_rows(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "fp8")
    export(plan, loaded, "tensorrt-llm", tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    values = stored[f"{NAME}.weight"].float() * stored[f"{NAME}.weight_scale"][:, None]
    torch.testing.assert_close(values, apply(plan, loaded).get_parameter(f"{NAME}.weight").data, rtol=2e-7, atol=0)
    quantization = stored_json(tmp_path / "out", "hf_quant_config.json")["quantization"]
    assert quantization["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert quantization["exclude_modules"] == ["lm_head"] and quantization["kv_cache_quant_algo"] is None


def test_fp8_per_tensor_has_one_scale_of_each(loaded: LoadedModel, tmp_path: Path) -> None:
    """ModelOpt's FP8: a scale for a weight, and one for its input from calibration."""
    bare = share_tensor_scales(uniform(loaded, "fp8_tensor_static"), loaded, "tensorrt-llm")
    plan = calibrate_static(bare, loaded, [PROMPT])
    export(plan, loaded, "tensorrt-llm", tmp_path / "out")
    stored, run = stored_tensors(tmp_path / "out"), apply(plan, loaded)
    assert stored[f"{NAME}.weight"].dtype == torch.float8_e4m3fn and stored[f"{NAME}.weight_scale"].numel() == 1
    values = stored[f"{NAME}.weight"].float() * stored[f"{NAME}.weight_scale"]
    torch.testing.assert_close(values, run.get_parameter(f"{NAME}.weight").data, rtol=2e-7, atol=0)
    assert stored[f"{NAME}.weight_scale"].item() == pytest.approx(
        float(loaded.model.get_parameter(f"{NAME}.weight").abs().max()) / 448, rel=1e-6
    )
    assert stored[f"{NAME}.input_scale"].item() == plan.tensors[f"{NAME}/input_scale"]
    quantization = stored_json(tmp_path / "out", "hf_quant_config.json")["quantization"]
    assert quantization["quant_algo"] == "FP8" and quantization["exclude_modules"] == ["lm_head"]


def test_pairs_of_rows_share_a_byte(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = planned(loaded, lambda site: "int4_g128" if "mlp" in site.name else "fp8" if "attn" in site.name else "bf16")
    export(plan, loaded, "tensorrt-llm", tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    packed = stored[f"{NAME}.weight"].numpy()
    codes = np.empty((2 * packed.shape[0], packed.shape[1]), dtype=np.int64)
    for row in range(len(codes)):
        nibble = (packed[row // 2] >> (4 * (row % 2))) & 15
        codes[row] = np.where(nibble > 7, nibble.astype(int) - 16, nibble)
    values = torch.from_numpy(codes) * stored[f"{NAME}.weight_scale"].float().repeat_interleave(128, 1)
    torch.testing.assert_close(values, apply(plan, loaded).get_parameter(f"{NAME}.weight").data, rtol=2e-7, atol=0)
    quantization = stored_json(tmp_path / "out", "hf_quant_config.json")["quantization"]
    assert quantization["quant_algo"] == "MIXED_PRECISION" and len(quantization["quantized_layers"]) == 14
    assert quantization["quantized_layers"][NAME] == {
        "quant_algo": "W4A16_AWQ",
        "group_size": 128,
        "has_zero_point": False,
        "pre_quant_scale": True,
    }


def test_fours_have_a_scale_for_every_tensor(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = share_tensor_scales(uniform(loaded, "nvfp4_static"), loaded, "tensorrt-llm")
    export(plan, loaded, "tensorrt-llm", tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    packed = stored[f"{NAME}.weight"].long()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    scales = stored[f"{NAME}.weight_scale"].float() * stored[f"{NAME}.weight_scale_2"]
    values = numbers * scales.repeat_interleave(16, 1)
    torch.testing.assert_close(values, apply(plan, loaded).get_parameter(f"{NAME}.weight").data, rtol=2e-7, atol=0)
    assert stored[f"{NAME}.input_scale"].item() == plan.tensors[f"{NAME}/input_scale"]
    quantization = stored_json(tmp_path / "out", "hf_quant_config.json")["quantization"]
    assert (quantization["quant_algo"], quantization["group_size"]) == ("NVFP4", 16)


def cached_in_fp8(loaded: LoadedModel) -> Plan:
    """Every cache in FP8 with the scale 0.25."""
    sites = [site for site in find_value_sites(loaded.model) if site.role == "kv_cache"]
    scales = {f"{site.name}/scale": np.array([0.25], dtype=np.float32) for site in sites}
    plan = plan_of([choice(site, "fp8_e4m3_tensor") for site in sites], scales)
    return plan.replace(model=plan.model.model_copy(update={"hash": loaded.hash}))


def test_caches_have_one_scale_a_layer(loaded: LoadedModel, tmp_path: Path) -> None:
    export(cached_in_fp8(loaded), loaded, "tensorrt-llm", tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    assert stored["model.layers.0.self_attn.v_proj.v_scale"].item() == 0.25
    assert stored_json(tmp_path / "out", "hf_quant_config.json")["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("fp8_static", "no fp8_e4m3 per row, fp32 scales with inputs as fp8_e4m3 per tensor"),
        ("int4_g64", "no int4 per group"),
        ("nvfp4", "tensor scale is found on every call"),
        ("fp8_w", "with inputs in 16 bits"),
    ],
)
def test_what_has_no_recipe_is_refused(loaded: LoadedModel, tmp_path: Path, scheme: str, says: str) -> None:
    with pytest.raises(ExportError, match=says):
        export(uniform(loaded, scheme), loaded, "tensorrt-llm", tmp_path / "out")


_READ = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.quant_utils import postprocess_state_dict, to_quantized_weight
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
folder, values = Path(sys.argv[1]), torch.load(sys.argv[2])
print(json.dumps(convert_hf_quant_config_format(json.loads((folder / "hf_quant_config.json").read_text()))))
stored = load_file(folder / "model.safetensors")
for name, (kind, weight, size) in values.items():
    scale, second = stored[name + ".weight_scale"].float(), stored.get(name + ".weight_scale_2")
    again = to_quantized_weight(weight, scale, kind, second, block_size=size).view(torch.uint8)
    ours = stored[name + ".weight"].view(torch.uint8)
    if kind == "nvfp4":  # values are compared: a zero may have either sign
        ours, again = (torch.stack([codes & 15, codes >> 4]) for codes in (ours, again))
        ours, again = ours.where(ours != 8, 0), again.where(again != 8, 0)
    assert torch.equal(again, ours), name
    held = {"fp8_pc_pt": FP8QTensor, "nvfp4": NVFP4QTensor}.get(kind)
    if held is not None:
        scale = scale[:, None] if kind == "fp8_pc_pt" else scale
        read = held(weight.shape, torch.float32, stored[name + ".weight"]).dequantize(
            scale=scale, double_scale=second, block_sizes={-1: 16} if kind == "nvfp4" else None)
        torch.testing.assert_close(read, weight, rtol=2e-7, atol=0)
cache = {name: scale for name, scale in stored.items() if name.endswith((".k_scale", ".v_scale"))}
amax = {name[:-len("_proj.k_scale")] + "_bmm_quantizer._amax": 448 * scale for name, scale in cache.items()}
named = postprocess_state_dict(amax, 448, "FP8")
assert cache and named.keys() == cache.keys(), (named.keys(), cache.keys())
assert all(torch.equal(named[name], scale.float()) for name, scale in cache.items())
"""


@pytest.mark.slow
@pytest.mark.skipif(not READER, reason="BITWRIGHT_MODELOPT_PYTHON names no python with ModelOpt")
def test_modelopt_reads_the_config_and_makes_the_same_bytes_of_the_values(loaded: LoadedModel, tmp_path: Path) -> None:
    assert READER
    names = {FOURS: "nvfp4_static"}
    schemes = {"mlp": "int4_g128", "attn": "fp8"}
    weights = planned(
        loaded,
        lambda site: names.get(site.name, schemes.get(site.role.partition(".")[0], "bf16")),
        {f"{FOURS}/input_scale": np.array(0.02, dtype=np.float32)},
    )
    caches = cached_in_fp8(loaded)
    plan = weights.replace(sites=weights.sites + caches.sites).attach(tensors={**weights.tensors, **caches.tensors})
    export(plan, loaded, "tensorrt-llm", tmp_path / "out", dtype="fp32")
    run = apply(plan, loaded)
    kinds = {NAME: ("int4_awq", 128), "model.layers.0.self_attn.q_proj": ("fp8_pc_pt", 128), FOURS: ("nvfp4", 16)}
    values = {name: (kind, run.get_parameter(f"{name}.weight").data, size) for name, (kind, size) in kinds.items()}
    torch.save(values, tmp_path / "v.pt")
    done = subprocess.run(
        [READER, "-c", _READ, tmp_path / "out", tmp_path / "v.pt"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "config_groups" in done.stdout
