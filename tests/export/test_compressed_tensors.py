"""Folders of compressed-tensors: every number read back as its document says, and as the package itself reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_models import PROMPT, bits_of_words, planned, small_model, stored_json, stored_tensors, uniform
from small_plans import choice, plan_of
from torch import Tensor

from bitwright.errors import ExportError
from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import find_sites
from bitwright.models.value_sites import find_value_sites
from bitwright.quantize import VALUE_SCHEMES

#: A python with transformers and compressed-tensors.
READER = os.environ.get("BITWRIGHT_COMPRESSED_TENSORS_PYTHON") or (
    sys.executable if find_spec("compressed_tensors") else None
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


def integers(parts: dict[str, Tensor], bits: int) -> Tensor:
    """Values of pack-quantized weights, by the document."""
    rows, columns = parts["weight_shape"].tolist()
    codes = torch.from_numpy(bits_of_words(parts["weight_packed"].numpy(), bits, columns)) - 2 ** (bits - 1)
    scales = parts["weight_scale"].float()
    if "weight_zero_point" in parts:
        down = bits_of_words(np.ascontiguousarray(parts["weight_zero_point"].numpy().T), bits, rows)
        codes = codes - (torch.from_numpy(down).T - 2 ** (bits - 1)).repeat_interleave(columns // scales.shape[1], 1)
    return codes * scales.repeat_interleave(columns // scales.shape[1], 1)


def plain(parts: dict[str, Tensor]) -> Tensor:
    """Values of int-, float- and naive-quantized weights."""
    weight, scales = parts["weight"].float(), parts["weight_scale"].float()
    if scales.shape[0] != weight.shape[0]:
        scales = scales.repeat_interleave(128, 0)[: weight.shape[0]]
    return weight * scales.repeat_interleave(-(-weight.shape[1] // scales.shape[1]), 1)[:, : weight.shape[1]]


def fours(parts: dict[str, Tensor]) -> Tensor:
    """Values of mxfp4-pack-quantized weights."""
    nibbles = torch.stack([parts["weight_packed"] & 15, parts["weight_packed"] >> 4], -1).flatten(1).long()
    numbers = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    return numbers * (2.0 ** (parts["weight_scale"].float() - 127)).repeat_interleave(32, 1)


def eights(parts: dict[str, Tensor]) -> Tensor:
    """Values of mxfp8-quantized weights."""
    return parts["weight"].float() * (2.0 ** (parts["weight_scale"].float() - 127)).repeat_interleave(32, 1)


#: Scheme → (layout, reader, the config's weights without what is the same everywhere, its inputs).
SCHEMES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any] | None]] = {
    "int4_g64": ("pack-quantized", lambda p: integers(p, 4), {"strategy": "group", "group_size": 64}, None),
    "int4_g32_zp": ("pack-quantized", lambda p: integers(p, 4), {"symmetric": False, "group_size": 32}, None),
    "int8_w": ("pack-quantized", lambda p: integers(p, 8), {"strategy": "channel", "num_bits": 8}, None),
    "int8": ("int-quantized", plain, {"strategy": "channel"}, {"strategy": "token", "dynamic": True, "type": "int"}),
    "int8_static": ("int-quantized", plain, {"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}),
    "fp8_w": ("naive-quantized", plain, {"type": "float", "num_bits": 8}, None),
    "fp8": ("float-quantized", plain, {"type": "float"}, {"strategy": "token", "dynamic": True, "type": "float"}),
    "fp8_static": ("float-quantized", plain, {"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}),
    "fp8_block": (
        "float-quantized",
        plain,
        {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        fours,
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "mxfp8": ("mxfp8-quantized", eights, {"group_size": 32, "scale_dtype": "torch.uint8"}, {"group_size": 32}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_has_the_values_that_run(loaded: LoadedModel, tmp_path: Path, scheme: str) -> None:
    layout, read, weights, inputs = SCHEMES[scheme]
    plan = uniform(loaded, scheme)
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored = stored_tensors(tmp_path / "out")
    run = apply(plan, loaded)
    for site in find_sites(loaded.model):
        if site.role in ("embedding", "lm_head"):
            continue
        parts = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{site.module}.")}
        expected = run.get_parameter(site.parameter)
        torch.testing.assert_close(read(parts), expected.data, rtol=2e-7, atol=0)
        if plan.tensors:
            assert parts["input_scale"].item() == plan.tensors[f"{site.name}/input_scale"]
    config = stored_json(tmp_path / "out")["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == group["format"] == layout
    assert {key: group["weights"][key] for key in weights} == weights
    assert (group["input_activations"] is None) == (inputs is None)
    assert inputs is None or {key: group["input_activations"][key] for key in inputs} == inputs
    assert config["ignore"] == ["lm_head"]
    assert len(group["targets"]) == 14


def test_three_bits_cross_words(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "int3_g64")
    with pytest.raises(ExportError, match="vllm has no int3 weights"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out")
    export(plan, loaded, "compressed-tensors", tmp_path / "out", engine="transformers")
    stored = stored_tensors(tmp_path / "out")
    parts = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{MODULE}.")}
    assert parts["weight_packed"].shape == (128, 256 * 3 // 32)
    torch.testing.assert_close(integers(parts, 3), apply(plan, loaded).get_parameter(f"{MODULE}.weight").data)


def test_layers_are_mixed_by_groups_and_the_others_ignored(loaded: LoadedModel, tmp_path: Path) -> None:
    def scheme_of(site: Any) -> str:
        if site.role in ("embedding", "lm_head") or ".0.self_attn" in site.name:
            return "as_loaded"
        return "fp8" if ".1.mlp" in site.name else "int4_g64" if "mlp" in site.name else "bf16"

    plan = planned(loaded, scheme_of)
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    config = stored_json(tmp_path / "out")["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"]: len(group["targets"]) for group in config["config_groups"].values()} == {
        "pack-quantized": 3,
        "float-quantized": 3,
    }
    assert len(config["ignore"]) == 9
    stored = stored_tensors(tmp_path / "out")
    plain_name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(stored[plain_name], loaded.model.get_parameter(plain_name).data, rtol=0, atol=0)
    rounded = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(stored[rounded], loaded.model.get_parameter(rounded).bfloat16().float())


def test_caches_get_their_scales(loaded: LoadedModel, tmp_path: Path) -> None:
    sites = [site for site in find_value_sites(loaded.model) if site.role == "kv_cache"]
    for scheme, strategy, shape in (("fp8_e4m3_tensor", "tensor", (1,)), ("fp8_e4m3_head", "attn_head", (4, 1, 1))):
        size = 1 if VALUE_SCHEMES[scheme].axis == "tensor" else 4
        scales = {f"{site.name}/scale": np.arange(1, 1 + size, dtype=np.float32) for site in sites}
        plan = plan_of([choice(site, scheme) for site in sites], scales)
        plan = plan.replace(model=plan.model.model_copy(update={"hash": loaded.hash}))
        out = tmp_path / scheme
        export(plan, loaded, "compressed-tensors", out)
        args = stored_json(out)["quantization_config"]["kv_cache_scheme"]
        assert args == {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        stored = stored_tensors(out)["model.layers.1.self_attn.v_scale"]
        assert stored.shape == shape and stored.flatten().tolist() == list(range(1, 1 + size))


def test_factors_go_into_the_norms(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "int4_g64", "column_scales")
    with pytest.raises(ExportError, match=r"attn.q, attn.k, attn.v.*: model.layers.\{0-1\}.self_attn.o_proj"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out")
    readers = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")
    kept = plan_of(
        [c for c in plan.sites if c.role in readers],
        {name: value for name, value in plan.tensors.items() if plan.site(name.rpartition("/")[0]).role in readers},
    )
    kept = kept.replace(model=plan.model)
    export(kept, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored = stored_tensors(tmp_path / "out")
    factors = torch.from_numpy(kept.tensors["model.layers.0.self_attn.q_proj/column_scales"])
    norm = "model.layers.0.input_layernorm.weight"
    torch.testing.assert_close(stored[norm] * factors, loaded.model.get_parameter(norm).data)
    rebuilt = small_model().model
    rebuilt.load_state_dict(loaded.model.state_dict())
    rebuilt.get_parameter("lm_head.weight")
    for name, parameter in rebuilt.named_parameters():
        parts = {
            n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{name.removesuffix('weight')}weight_")
        }
        parameter.data = integers(parts, 4).float() if parts else stored[name]
    with torch.no_grad():
        torch.testing.assert_close(
            rebuilt(input_ids=PROMPT).logits, apply(kept, loaded)(input_ids=PROMPT).logits, rtol=1e-4, atol=1e-4
        )


def test_factors_that_disagree_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "int4_g64", "column_scales")
    sites = [c for c in plan.sites if c.role in ("attn.q", "attn.k", "attn.v")]
    tensors = {name: value for name, value in plan.tensors.items() if plan.site(name.rpartition("/")[0]) in sites}
    tensors["model.layers.1.self_attn.k_proj/column_scales"] = (
        tensors["model.layers.1.self_attn.k_proj/column_scales"] * 2
    )
    torn = plan_of(sites, tensors).replace(model=plan.model)
    with pytest.raises(ExportError, match=r"cannot go into model.layers.1.input_layernorm: .*k_proj"):
        export(torn, loaded, "compressed-tensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_parts_of_a_fused_kernel_share_what_there_is_one_of(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "fp8_static")
    scale = "model.layers.0.self_attn.k_proj/input_scale"
    torn = plan.attach(tensors={**plan.tensors, scale: np.array(0.5, dtype=np.float32)})
    with pytest.raises(ExportError, match="under one static scale of the input, and its parts have several"):
        export(torn, loaded, "compressed-tensors", tmp_path / "out")
    export(torn, loaded, "compressed-tensors", tmp_path / "out", engine="transformers")


def test_nvfp4_inputs_have_no_scale_to_write(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="stores the tensor scale of fp4_e2m1 inputs"):
        export(uniform(loaded, "nvfp4"), loaded, "compressed-tensors", tmp_path / "out")


def test_rotations_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="without changes of inputs at run time, which hadamard needs"):
        export(uniform(loaded, "int4_g64", "signs"), loaded, "compressed-tensors", tmp_path / "out")


_READ = """
import sys, torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
ids, *folders = sys.argv[1:]
for folder in folders:
    # packed zero points have another shape in the empty model that compressed-tensors 0.20 makes
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if folder.endswith("_zp") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    with torch.no_grad():
        torch.save(model(torch.load(ids)).logits, folder + ".pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(not READER, reason="compressed-tensors is not installed")
def test_transformers_gives_the_logits_of_the_plan(loaded: LoadedModel, tmp_path: Path) -> None:
    assert READER
    schemes = ("int4_g64", "int4_g32_zp", "int3_g64", "int8_w", "fp8_w", "fp8_static", "int8_static", "fp8")
    plans = {scheme: uniform(loaded, scheme) for scheme in schemes}
    for scheme, plan in plans.items():
        export(plan, loaded, "compressed-tensors", tmp_path / scheme, dtype="fp32", engine="transformers")
    torch.save(PROMPT, tmp_path / "ids.pt")
    subprocess.run(
        [READER, "-c", _READ, tmp_path / "ids.pt", *(tmp_path / scheme for scheme in schemes)],
        check=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    for scheme, plan in plans.items():
        with torch.no_grad():
            expected = apply(plan, loaded)(input_ids=PROMPT).logits
        found = torch.load(tmp_path / f"{scheme}.pt")
        assert (found - expected).norm() <= 1e-3 * expected.norm(), scheme


def test_the_config_is_json_that_says_what_it_is(loaded: LoadedModel, tmp_path: Path) -> None:
    export(uniform(loaded, "int4_g64"), loaded, "compressed-tensors", tmp_path / "out", dtype="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
