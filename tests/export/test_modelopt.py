"""A quant_cfg for ModelOpt: names every quantiser, and finds the plan's codes when it is applied."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import PROMPT, planned, small_model, stored_tensors, uniform
from safetensors.torch import load_file

from bitwright.errors import ExportError
from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel

#: A python with ModelOpt.
READER = os.environ.get("BITWRIGHT_MODELOPT_PYTHON")


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


def test_quantisers_are_enabled_one_by_one(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = planned(loaded, lambda site: "int4_g64" if "mlp" in site.name else "fp8" if "attn" in site.name else "bf16")
    export(plan, loaded, "modelopt", tmp_path / "out", dtype="fp32")
    lines = (tmp_path / "out" / "quant_cfg.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == ["algorithm: max", "quant_cfg:", '- {quantizer_name: "*", enable: false}']
    assert (
        '- {quantizer_name: "model.layers.1.mlp.up_proj.weight_quantizer", '
        "cfg: {num_bits: 4, block_sizes: {-1: 64}}, enable: true}"
    ) in lines
    assert (
        '- {quantizer_name: "model.layers.0.self_attn.q_proj.input_quantizer", '
        'cfg: {num_bits: [4, 3], block_sizes: {-1: null, type: "dynamic"}}, enable: true}'
    ) in lines
    assert len(lines) == 3 + 6 + 8 * 2


def test_amax_is_the_scale_times_the_largest_code(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "int8_static")
    export(plan, loaded, "modelopt", tmp_path / "out", dtype="fp32")
    name = "model.layers.0.mlp.up_proj"
    amax = load_file(tmp_path / "out" / "amax.safetensors")
    weights = stored_tensors(tmp_path / "out")[f"{name}.weight"]
    assert torch.equal(weights, apply(plan, loaded).get_parameter(f"{name}.weight").data)
    torch.testing.assert_close(amax[f"{name}.weight_quantizer"], weights.abs().amax(1, keepdim=True))
    assert amax[f"{name}.input_quantizer"].item() == pytest.approx(0.02 * 127)


@pytest.mark.parametrize("scheme", ["nf4_g64", "int4_g64_zp", "nvfp4", "mxfp4", "fp8_block"])
def test_what_is_not_written_is_refused(loaded: LoadedModel, tmp_path: Path, scheme: str) -> None:
    with pytest.raises(ExportError, match="quant_cfg is written for"):
        export(uniform(loaded, scheme), loaded, "modelopt", tmp_path / "out")


_READ = """
import sys
from pathlib import Path
import torch, yaml
import modelopt.torch.quantization as mtq
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
ids, *folders = sys.argv[1:]
for folder in map(Path, folders):
    config = yaml.safe_load((folder / "quant_cfg.yaml").read_text())
    model = mtq.quantize(AutoModelForCausalLM.from_pretrained(folder), config)
    for name, amax in load_file(folder / "amax.safetensors").items():
        model.get_submodule(name).amax = amax
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        torch.save((model(torch.load(ids)).logits, layer.weight_quantizer(layer.weight)), f"{folder}.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(not READER, reason="BITWRIGHT_MODELOPT_PYTHON names no python with ModelOpt")
def test_modelopt_finds_the_codes_of_the_plan(loaded: LoadedModel, tmp_path: Path) -> None:
    assert READER
    plans = {scheme: uniform(loaded, scheme) for scheme in ("int4_g64", "int8_w", "fp8_w", "int8_static", "fp8")}
    for scheme, plan in plans.items():
        export(plan, loaded, "modelopt", tmp_path / scheme, dtype="fp32")
    torch.save(PROMPT, tmp_path / "ids.pt")
    done = subprocess.run(
        [READER, "-c", _READ, tmp_path / "ids.pt", *(tmp_path / scheme for scheme in plans)],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for scheme, plan in plans.items():
        run = apply(plan, loaded)
        with torch.no_grad():
            expected = run(input_ids=PROMPT).logits
        logits, weight = torch.load(tmp_path / f"{scheme}.pt")
        torch.testing.assert_close(
            weight, run.get_parameter("model.layers.0.mlp.up_proj.weight").data, rtol=1e-6, atol=1e-7
        )
        assert (logits - expected).norm() <= 1e-3 * expected.norm(), scheme
