"""Folders of compressed-tensors: every number read back as its document says, and as the package itself reads it."""

from __future__ import annotations

import copy
import json
import os
import re
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
from bitwright.export import export, share_tensor_scales, supported_schemes
from bitwright.inference import apply, calibrate_static
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.sites import find_sites
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import SCHEMES as SCHEMES_OF
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.static_scales import round_input

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


def nibbles(parts: dict[str, Tensor]) -> Tensor:
    """E2M1 numbers, two a byte, the even column below."""
    codes = torch.stack([parts["weight_packed"] & 15, parts["weight_packed"] >> 4], -1).flatten(1).long()
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def fours(parts: dict[str, Tensor]) -> Tensor:
    """Values of mxfp4-pack-quantized weights."""
    return nibbles(parts) * (2.0 ** (parts["weight_scale"].float() - 127)).repeat_interleave(32, 1)


def sixteens(parts: dict[str, Tensor]) -> Tensor:
    """Values of nvfp4-pack-quantized weights: scales are divided by the global one."""
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    return nibbles(parts) * scales.repeat_interleave(16, 1)


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
    "mxfp4_w": ("mxfp4-pack-quantized", fours, {"group_size": 32, "scale_dtype": "torch.uint8"}, None),
    "nvfp4_w": (
        "nvfp4-pack-quantized",
        sixteens,
        {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        None,
    ),
    "nvfp4_static": (
        "nvfp4-pack-quantized",
        sixteens,
        {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ),
    "mxfp8": ("mxfp8-quantized", eights, {"group_size": 32, "scale_dtype": "torch.uint8"}, {"group_size": 32}),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_has_the_values_that_run(loaded: LoadedModel, tmp_path: Path, scheme: str) -> None:
    layout, read, weights, inputs = SCHEMES[scheme]
    plan = share_tensor_scales(uniform(loaded, scheme), loaded, "vllm")
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored = stored_tensors(tmp_path / "out")
    run = apply(plan, loaded)
    for site in find_sites(loaded.model):
        if site.role in ("embedding", "lm_head"):
            continue
        parts = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{site.module}.")}
        expected = run.get_parameter(site.parameter)
        torch.testing.assert_close(read(parts), expected.data, rtol=2.5e-7, atol=0)
        if "input_scale" in parts:
            assert parts["input_scale"].item() == plan.tensors[f"{site.name}/input_scale"]
        assert ("input_global_scale" in parts) == (scheme == "nvfp4_static")
        if "input_global_scale" in parts:
            assert parts["input_global_scale"].item() == pytest.approx(1 / 0.02, rel=1e-6)
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
        scales = {f"{site.name}/scale": np.arange(2, 2 + size, dtype=np.float32) for site in sites}
        plan = plan_of([choice(site, scheme) for site in sites], scales)
        plan = plan.replace(model=plan.model.model_copy(update={"hash": loaded.hash}))
        out = tmp_path / scheme
        export(plan, loaded, "compressed-tensors", out)
        args = stored_json(out)["quantization_config"]["kv_cache_scheme"]
        assert args == {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
        stored = stored_tensors(out)["model.layers.1.self_attn.v_scale"]
        assert stored.shape == shape and stored.flatten().tolist() == list(range(2, 2 + size))


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


def test_nvfp4_inputs_whose_scale_is_found_on_every_call_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"stores the tensor scale of fp4_e2m1 inputs.*finds it in calibration"):
        export(uniform(loaded, "nvfp4"), loaded, "compressed-tensors", tmp_path / "out")


def test_parts_of_a_fused_kernel_have_one_tensor_scale(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "nvfp4_w")
    with pytest.raises(ExportError, match=r"under one tensor scale, and its parts have several .*share_tensor_scales"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out")
    shared = share_tensor_scales(plan, loaded, "vllm")
    export(shared, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored = stored_tensors(tmp_path / "out")
    of_layer = {part: stored[f"model.layers.0.self_attn.{part}_proj.weight_global_scale"].item() for part in "qkvo"}
    assert of_layer["q"] == of_layer["k"] == of_layer["v"] != of_layer["o"]
    # the largest magnitude of the three, and each part's groups in units of it: what compressed-tensors would find
    weights = [loaded.model.get_parameter(f"model.layers.0.self_attn.{part}_proj.weight").data for part in "qkv"]
    largest = max(float(weight.abs().max()) for weight in weights)
    assert of_layer["q"] == pytest.approx(448 * 6 / largest, rel=1e-6)
    for part, weight in zip("qkv", weights, strict=True):
        amax = weight.unflatten(1, (-1, 16)).abs().amax(-1)
        expected = (amax / 6 * of_layer["q"]).to(torch.float8_e4m3fn).float()
        found = stored[f"model.layers.0.self_attn.{part}_proj.weight_scale"].float()
        assert (found == expected).float().mean() > 0.999
        torch.testing.assert_close(found, expected, rtol=1 / 8, atol=2**-9)
    assert share_tensor_scales(shared, loaded, "vllm") is shared
    assert share_tensor_scales(plan, loaded, "transformers") is plan


def test_codes_that_were_found_with_data_do_not_share(loaded: LoadedModel) -> None:
    plan = share_tensor_scales(uniform(loaded, "nvfp4_w"), loaded, "vllm")
    name = "model.layers.0.self_attn.k_proj/tensor_scale"
    torn = plan.attach(tensors={**plan.tensors, name: np.array(2 * plan.tensors[name])})
    with pytest.raises(ExportError, match=r"codes of these were found with data.*\(shared\).*self_attn.k_proj"):
        share_tensor_scales(torn, loaded, "vllm")


def test_zero_points_are_mixed_with_nothing_in_transformers(loaded: LoadedModel, tmp_path: Path) -> None:
    """It reads all layers under the first group's settings once weights are dequantised, which zero points ask for."""
    plan = planned(
        loaded, lambda site: "int4_g64" if "attn" in site.role else "int4_g32_zp" if "mlp" in site.role else "bf16"
    )
    with pytest.raises(ExportError, match=r"transformers loads int4_g32_zp only where .*mlp.gate_proj"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out", engine="transformers")
    notes = export(plan, loaded, "compressed-tensors", tmp_path / "out").notes
    assert any("cannot load this" in note for note in notes)


def test_rotations_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="without changes of inputs at run time, which hadamard needs"):
        export(uniform(loaded, "int4_g64", "signs"), loaded, "compressed-tensors", tmp_path / "out")


_READ = """
import sys, torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
ids, *folders = sys.argv[1:]
for folder in folders:
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if folder.endswith("_whole") else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    with torch.no_grad():
        torch.save(model(torch.load(ids)).logits, folder + ".pt")
"""


def logits_of_transformers(folders: list[Path]) -> list[Tensor]:
    """What the real reader makes of folders, in its own process; of `…_whole`, with weights that are dequantised."""
    assert READER
    ids = folders[0].parent / "ids.pt"
    torch.save(PROMPT, ids)
    done = subprocess.run(
        [READER, "-c", _READ, ids, *folders],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{folder}.pt") for folder in folders]


def rounded_to_halves(x: Tensor) -> Tensor:
    """INT8 tokens as compressed-tensors rounds them: 127.5 steps to the largest magnitude, and not 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def rounded_in_groups(x: Tensor) -> Tensor:
    """FP8 groups of 128 as compressed-tensors rounds them: under any scale, and not under powers of two."""
    groups = x.unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


#: Scheme → how transformers rounds inputs where that is not how the engines that it is written for do (vLLM, and so
#: ours). MX and NVFP4 it computes with whole weights, and their inputs as they are.
INPUTS_OF_TRANSFORMERS: dict[str, Any] = {
    "int8": rounded_to_halves,
    "fp8_block": rounded_in_groups,
    "mxfp8": torch.Tensor.clone,
    "mxfp4": torch.Tensor.clone,
    "nvfp4_static": torch.Tensor.clone,
}


def with_inputs_of_transformers(loaded: LoadedModel, plan: Plan, scheme: str) -> Any:
    """The model with the plan's weights, and the other rounding of inputs."""
    run, model = apply(plan, loaded), copy.deepcopy(loaded.model)
    for site in find_sites(loaded.model):
        if site.role not in ("embedding", "lm_head"):
            model.get_parameter(site.parameter).data = run.get_parameter(site.parameter).data
            rounded = INPUTS_OF_TRANSFORMERS[scheme]
            model.get_submodule(site.module).register_forward_pre_hook(
                lambda module, inputs, rounded=rounded: (rounded(inputs[0]),)
            )
    return model


def layers_mixed(loaded: LoadedModel) -> Plan:
    """Rounded inputs, groups and rows in one dense plan."""

    def scheme_of(site: Any) -> str:
        if site.role in ("embedding", "lm_head") or ".0.self_attn" in site.name:
            return "as_loaded"
        return "fp8" if ".1.mlp" in site.name else "int4_g64" if "mlp" in site.name else "int8_w"

    return planned(loaded, scheme_of)


@pytest.mark.slow
@pytest.mark.skipif(not READER, reason="compressed-tensors is not installed")
def test_transformers_gives_the_logits_of_the_plan(
    loaded: LoadedModel, make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Every scheme that is written for it."""
    mixtral = from_memory(make_tiny_model("mixtral"), tiny_tokenizer, name="mixtral")
    names = {name for name in supported_schemes("compressed-tensors", "transformers") if SCHEMES_OF[name].weights}
    coded = {name for name in names if (weights := SCHEMES_OF[name].weights) and weights.scaling is not None}
    # packed zero points have another shape in the empty model that compressed-tensors 0.20 makes, and experts none;
    # weights of MX and NVFP4 are bf16 there
    whole = {name for name in coded if "_zp" in name or name.startswith(("mx", "nvfp4"))}
    assert len(coded) >= 22 and whole and set(INPUTS_OF_TRANSFORMERS) < coded
    made: dict[str, tuple[LoadedModel, Plan]] = {"mixed": (loaded, layers_mixed(loaded))}
    for scheme in sorted(coded):
        plan = uniform(loaded, scheme)
        if SCHEMES_OF[scheme].static_activations:
            plan = calibrate_static(plan, loaded, [PROMPT])
        made[f"{scheme}_whole" if scheme in whole else scheme] = (loaded, plan)
    made |= {f"experts_{scheme}_whole": (mixtral, expert_plan(mixtral, scheme)) for scheme in ("int4_g32", "fp8_w")}
    for name, (model, plan) in made.items():
        export(plan, model, "compressed-tensors", tmp_path / name, dtype="fp32", engine="transformers")
    found = logits_of_transformers([tmp_path / name for name in made])
    for (name, (model, plan)), logits in zip(made.items(), found, strict=True):
        scheme = name.removesuffix("_whole")
        other = scheme in INPUTS_OF_TRANSFORMERS
        run: Any = with_inputs_of_transformers(model, plan, scheme) if other else apply(plan, model)
        for site in find_sites(model.model) if scheme.startswith("nvfp4") else ():
            if site.role not in ("embedding", "lm_head"):
                weight = run.get_parameter(site.parameter)
                weight.data = weight.data.bfloat16().float()
        with torch.no_grad():
            expected = run(input_ids=PROMPT).logits
        assert (logits - expected).norm() <= 1e-3 * expected.norm(), name


def test_nvfp4_is_read_by_compressed_tensors_itself(loaded: LoadedModel, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    plan = calibrate_static(uniform(loaded, "nvfp4_static"), loaded, [PROMPT])
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32", engine="transformers")
    settings = stored_json(tmp_path / "out")["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    inputs, stored = scheme.input_activations, stored_tensors(tmp_path / "out")
    parts = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{MODULE}.")}
    names = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").compression_param_names(scheme)
    assert set(names) == set(parts) - {"input_global_scale"}
    weight = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized").decompress(dict(parts), scheme)["weight"]
    ours = apply(plan, loaded).get_parameter(f"{MODULE}.weight").data
    torch.testing.assert_close(weight.float(), ours, rtol=2**-8, atol=0)
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    scale, zero = compute_dynamic_scales_and_zp(x, inputs, torch.nn.Module(), parts["input_global_scale"])
    theirs = fake_quantize(x, scale, zero, inputs, global_scale=parts["input_global_scale"])
    activations = SCHEMES_OF["nvfp4_static"].activations
    assert activations is not None
    rounded = round_input(x, activations, torch.from_numpy(plan.tensors[f"{MODULE}/input_scale"]))
    assert torch.isclose(theirs, rounded, rtol=1e-5, atol=0).float().mean() > 0.999


def test_transformers_keeps_no_caches(loaded: LoadedModel, tmp_path: Path) -> None:
    sites = [site for site in find_value_sites(loaded.model) if site.role == "kv_cache"]
    plan = plan_of([choice(site, "fp8_e4m3_tensor") for site in sites])
    plan = plan.replace(model=plan.model.model_copy(update={"hash": loaded.hash}))
    with pytest.raises(ExportError, match=r"runs its quantised cache in .*, not in fp8_e4m3"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out", engine="transformers")


def expert_plan(loaded: LoadedModel, scheme: str) -> Plan:
    """Experts under one scheme, attention under another, the rest as loaded."""
    return planned(
        loaded,
        lambda site: (
            scheme if site.role.startswith("expert") else "int8_w" if "self_attn" in site.name else "as_loaded"
        ),
    )


def test_experts_are_matrices_of_their_own(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    mixtral = from_memory(make_tiny_model("mixtral"), tiny_tokenizer, name="mixtral")
    plan = expert_plan(mixtral, "int4_g32")
    export(plan, mixtral, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored = stored_tensors(tmp_path / "out")
    apply(plan, mixtral).save_pretrained(tmp_path / "theirs")
    theirs = stored_tensors(tmp_path / "theirs")
    experts = [name for name in theirs if ".experts." in name]
    assert len(experts) > 10 and not any(name in stored for name in experts)
    for name in experts:
        module = name.removesuffix("weight")
        parts = {n.rpartition(".")[2]: tensor for n, tensor in stored.items() if n.startswith(module)}
        torch.testing.assert_close(integers(parts, 4), theirs[name], rtol=2e-7, atol=0)
    groups = stored_json(tmp_path / "out")["quantization_config"]["config_groups"].values()
    (of_experts,) = [group for group in groups if any("experts" in target for target in group["targets"])]
    patterns = [target for target in of_experts["targets"] if target.startswith("re:")]
    names = [name.removesuffix(".weight") for name in experts]
    assert set(names) <= set(of_experts["targets"])
    assert all(any(re.match(pattern[3:], name) for pattern in patterns) for name in names)
    assert not any(re.match(pattern[3:], "model.layers.0.self_attn.q_proj") for pattern in patterns)


def test_what_transformers_has_no_experts_in_is_refused(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    mixtral = from_memory(make_tiny_model("mixtral"), tiny_tokenizer, name="mixtral")
    with pytest.raises(ExportError, match=r"transformers does not run pack-quantized, zero point at expert.gate"):
        export(expert_plan(mixtral, "int4_g32_zp"), mixtral, "compressed-tensors", tmp_path / "out", engine="hf")
    two = planned(mixtral, lambda site: "int8_w" if "0.mlp.experts" in site.name else "int4_g32")
    with pytest.raises(ExportError, match=r"transformers computes .*expert.gate.* at once"):
        export(two, mixtral, "compressed-tensors", tmp_path / "out", engine="hf")


def test_weights_stored_in_out_keep_lying_so(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    gpt2 = from_memory(make_tiny_model("gpt2"), tiny_tokenizer, name="gpt2")
    name = "transformer.h.1.attn.c_attn"
    for scheme, read in (("int8", plain), ("int4_g32", lambda parts: integers(parts, 4))):
        plan, out = uniform(gpt2, scheme), tmp_path / scheme
        export(plan, gpt2, "compressed-tensors", out, dtype="fp32")
        parts = {n.rpartition(".")[2]: t for n, t in stored_tensors(out).items() if n.startswith(f"{name}.")}
        if "weight" in parts:
            assert parts["weight"].shape == (64, 192)  # what engines turn, for its name
            parts["weight"] = parts["weight"].T
        expected = apply(plan, gpt2).get_parameter(f"{name}.weight").T
        torch.testing.assert_close(read(parts), expected, rtol=2e-7, atol=0)


def test_the_config_is_json_that_says_what_it_is(loaded: LoadedModel, tmp_path: Path) -> None:
    export(uniform(loaded, "int4_g64"), loaded, "compressed-tensors", tmp_path / "out", dtype="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16" and config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
