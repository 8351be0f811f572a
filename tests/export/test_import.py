"""Checkpoints of other tools become plans whose effective weights are theirs, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_checkpoints as foreign
import pytest
import torch
from export_models import planned, small_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from bitwright import models
from bitwright.errors import ModelError
from bitwright.export import export
from bitwright.export.imported_plan import ProofText, plan_of
from bitwright.export.importer import look, raise_if_refused, without_refused
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import site_weight
from bitwright.plan import Plan, load_plan, write_plan
from bitwright.quantize import SCHEMES

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_INT4_ZP = {"strategy": "group", "group_size": 32, "symmetric": False}

#: Name → (settings, their file, quantiser, the scheme that it becomes).
KINDS: dict[str, tuple[dict[str, Any], str, foreign.Quantizer, str]] = {
    "gptq": (_GPTQ, "config.json", foreign.gptq(), "int4_g32_zp"),
    "gptq of old": ({"bits": 4, "group_size": 32}, "quantize_config.json", foreign.gptq(), "int4_g32_zp"),
    "gptq v2": (
        {**_GPTQ, "checkpoint_format": "gptq_v2"},
        "config.json",
        foreign.gptq(layout="gptq_v2"),
        "int4_g32_zp",
    ),
    "gptq symmetric": (_GPTQ, "config.json", foreign.gptq(symmetric=True), "int4_g32"),
    "gptq 3 bits": ({**_GPTQ, "bits": 3}, "config.json", foreign.gptq(bits=3), "uint3:g32:fp16:zp"),
    "gptq 8 bits": ({**_GPTQ, "bits": 8}, "config.json", foreign.gptq(bits=8), "uint8:g32:fp16:zp"),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        "config.json",
        foreign.awq(),
        "int4_g32_zp",
    ),
    "awq of old": ({"w_bit": 4, "q_group_size": 32}, "quant_config.json", foreign.awq(), "int4_g32_zp"),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        "config.json",
        foreign.fp8_blocks(32, 32),
        "fp8_e4m3:b32x32:fp32|fp8_e4m3:g32:fp32",
    ),
    "fp8 blocks that are cut off": (
        {"quant_method": "fp8", "weight_block_size": [40, 36]},
        "config.json",
        foreign.fp8_blocks(40, 36, dtype=torch.bfloat16),
        "fp8_e4m3:b40x36:bf16|fp8_e4m3:g36:fp32",
    ),
    "fp8 rows": (
        {"quant_method": "fbgemm_fp8"},
        "config.json",
        foreign.fp8("row"),
        "fp8",
    ),
    "fp8 tensor, static inputs": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "config.json",
        foreign.fp8(static=True),
        "fp8_tensor_static",
    ),
    "modelopt fp8": (
        {"quantization": {"quant_algo": "FP8"}},
        "hf_quant_config.json",
        foreign.fp8(static=True, shape=()),
        "fp8_tensor_static",
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "config.json",
        foreign.nvfp4_of_modelopt,
        "nvfp4_static",
    ),
    "compressed int4 with zero points": (
        foreign.config_groups(4, **_INT4_ZP),
        "config.json",
        foreign.pack_quantized(32, 4, zero_points=True),
        "int4_g32_zp",
    ),
    "compressed int4": (
        foreign.config_groups(4, strategy="group", group_size=32, symmetric=True),
        "config.json",
        foreign.pack_quantized(32, 4, zero_points=False),
        "int4_g32",
    ),
    "compressed fp8": (
        foreign.config_groups(
            8,
            kind="float",
            strategy="channel",
            inputs={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        ),
        "config.json",
        foreign.fp8("row"),
        "fp8",
    ),
}


@pytest.fixture(scope="module")
def reference(make_tiny_folder: Callable[..., Path]) -> LoadedModel:
    return models.load(make_tiny_folder("llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> ProofText:
    """A text that is read in no time."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i} says {i * i}, no more than that." for i in range(400)))
    return ProofText(evaluation=file, evaluation_tokens=64, sequence_length=16)


@pytest.fixture(scope="module")
def imported(
    make_tiny_folder: Callable[..., Path], reference: LoadedModel, text: ProofText, tmp_path_factory: Any
) -> Any:
    """``imported(kind)`` → (plan, module → what its weights are by the kind's own rule), made once."""
    made: dict[str, tuple[Plan, dict[str, Tensor]]] = {}

    def make(kind: str) -> tuple[Plan, dict[str, Tensor]]:
        if kind not in made:
            settings, file, quantize, _ = KINDS[kind]
            folder = tmp_path_factory.mktemp("foreign") / "model"
            values = foreign.write(folder, make_tiny_folder("llama"), settings, quantize, file=file)
            found = look(folder, reference)
            raise_if_refused(found)
            made[kind] = plan_of(found, reference, text), values
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_effective_weights_are_the_checkpoints(kind: str, imported: Any, reference: LoadedModel) -> None:
    plan, values = imported(kind)
    without_inputs = plan.replace(
        sites=tuple(choice.model_copy(update={"scheme": weights_alone(choice.scheme)}) for choice in plan.sites)
    )
    planned = apply(without_inputs, reference)
    assert len(values) == 14
    for name, expected in values.items():
        assert torch.equal(planned.get_submodule(name).weight, expected), name


def weights_alone(scheme: str) -> str:
    """The scheme without what it does to inputs."""
    from bitwright.quantize.spelled_scheme import spell_scheme

    weights = SCHEMES[scheme].weights
    return scheme if weights is None else spell_scheme(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_says_what_was_found(kind: str, imported: Any, reference: LoadedModel) -> None:
    plan, values = imported(kind)
    chosen = {choice.name: choice for choice in plan.sites}
    assert {chosen[name].scheme for name in values} == {KINDS[kind][3]}
    assert {chosen[name].rounding for name in values} == {"imported"}
    left = [choice for name, choice in chosen.items() if name not in values]
    assert {choice.scheme for choice in left} == {"as_loaded"} and len(left) == 2
    assert plan.model.hash == reference.hash and not plan.met
    for name, choice in chosen.items():
        weights = SCHEMES[choice.scheme].weights
        assert choice.bytes == (
            4 * choice.shape[0] * choice.shape[1] if weights is None else weights.stored_bytes(*choice.shape)
        ), name


def test_a_plan_folder_holds_all_of_it(imported: Any, reference: LoadedModel, tmp_path: Path) -> None:
    plan, _ = imported("fp8 tensor, static inputs")
    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert read == plan
    ids = torch.arange(12).unsqueeze(0)
    assert torch.equal(apply(read, reference)(ids).logits, apply(plan, reference)(ids).logits)
    assert float(plan.tensors["model.layers.0.mlp.up_proj/input_scale"]) == 0.0625


def test_factors_that_were_folded_into_norms_are_found_again(
    make_tiny_folder: Callable[..., Path], text: ProofText, reference: LoadedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    factors = torch.rand(64, generator=torch.Generator().manual_seed(3)) * 2 + 0.25

    def scaled(name: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        reads_norm = name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        return foreign.awq()(name, weight_NK * factors if reads_norm else weight_NK)

    values = foreign.write(folder, make_tiny_folder("llama"), KINDS["awq"][0], scaled)
    tensors = load_file(folder / "model.safetensors")
    norms = {name: value / factors for name, value in tensors.items() if "layernorm" in name}
    save_file({**tensors, **norms}, folder / "model.safetensors")
    found = look(folder, reference)
    raise_if_refused(found)
    plan = plan_of(found, reference, text)
    by_name = {choice.name: choice for choice in plan.sites}
    assert by_name["model.layers.0.self_attn.q_proj"].transform != "none"
    assert by_name["model.layers.0.self_attn.o_proj"].transform == "none"
    np_factors = plan.tensors["model.layers.1.mlp.gate_proj/column_scales"]
    torch.testing.assert_close(torch.from_numpy(np_factors), factors)
    # the checkpoint's own model: its norms, and the weights that its codes are
    theirs = models.load(make_tiny_folder("llama")).model
    theirs.load_state_dict({**norms, **{f"{name}.weight": value for name, value in values.items()}}, strict=False)
    ids = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(apply(plan, reference)(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_parts_of_a_fused_matrix_are_cut_out_of_it(
    make_tiny_folder: Callable[..., Path], text: ProofText, tmp_path: Path
) -> None:
    reference = models.load(make_tiny_folder("phi3"))
    folder = tmp_path / "model"
    values = foreign.write(folder, make_tiny_folder("phi3"), _GPTQ, foreign.gptq())
    found = look(folder, reference)
    raise_if_refused(found)
    plan = plan_of(found, reference, text)
    assert any(choice.name.endswith("qkv_proj[k]") for choice in plan.sites)
    planned = apply(plan, reference)
    for name, expected in values.items():
        assert torch.equal(planned.get_submodule(name).weight, expected), name


def test_experts_are_found_under_the_names_of_their_checkpoint(
    make_tiny_folder: Callable[..., Path], text: ProofText, tmp_path: Path
) -> None:
    reference = models.load(make_tiny_folder("mixtral"))
    values = foreign.write(tmp_path / "model", make_tiny_folder("mixtral"), _GPTQ, foreign.gptq())
    found = look(tmp_path / "model", reference)
    raise_if_refused(found)
    planned = apply(plan_of(found, reference, text), reference)
    parts = {"w1": "gate_up[gate]", "w3": "gate_up[up]", "w2": "down"}  # Mixtral: silu(w1 x) · w3 x, then w2
    sites = {site.name: site for site in found.sites}
    of_experts = [name for name in values if ".experts." in name]
    assert len(of_experts) == 2 * 4 * 3
    for name in of_experts:
        expert, _, part = name.replace("block_sparse_moe", "mlp").rpartition(".")
        assert torch.equal(site_weight(planned, sites[f"{expert}.{parts[part]}"]), values[name]), name


def test_layers_may_be_stored_in_several_ways(
    make_tiny_folder: Callable[..., Path], text: ProofText, reference: LoadedModel, tmp_path: Path
) -> None:
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["re:.*mlp.*"], "weights": int4},
            "group_1": {"targets": ["Linear"], "weights": fp8},
        },
    }

    def quantize(name: str, weight_NK: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        kind = foreign.pack_quantized(32, 4, zero_points=False) if "mlp" in name else foreign.fp8("row")
        return kind(name, weight_NK)

    folder = tmp_path / "model"
    values = foreign.write(folder, make_tiny_folder("llama"), settings, quantize)
    found = look(folder, reference)
    raise_if_refused(found)
    planned = apply(plan_of(found, reference, text), reference)
    assert {item.matrix.scheme.name for item in found.taken if item.matrix is not None} == {"int4_g32", "fp8_w"}
    for name, expected in values.items():
        assert torch.equal(planned.get_submodule(name).weight, expected), name


def test_plain_numbers_of_a_checkpoint_are_rounded_or_kept(
    make_tiny_folder: Callable[..., Path], text: ProofText, reference: LoadedModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    foreign.write(folder, make_tiny_folder("llama"), _GPTQ, foreign.gptq())
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    tensors["model.embed_tokens.weight"] = (tensors["model.embed_tokens.weight"] * 1.5).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    found = look(folder, reference)
    raise_if_refused(found)
    plan = plan_of(found, reference, text)
    chosen = {choice.name: choice.scheme for choice in plan.sites}
    assert chosen["lm_head"] == "fp16:plain" and chosen["model.embed_tokens"] == "bf16:tensor:fp32"
    planned = apply(plan, reference)
    for name in ("lm_head", "model.embed_tokens"):
        assert torch.equal(planned.get_submodule(name).weight, tensors[f"{name}.weight"].float())


def test_numbers_that_were_rounded_to_16_bits_are_so_in_whatever_they_are_stored(
    tiny_tokenizer: Any, tmp_path: Path, text: ProofText
) -> None:
    """What this program exports in fp32 comes back: sites in bf16 and fp16 hold the reference's numbers, rounded."""
    loaded = small_model(tiny_tokenizer)
    schemes = {"mlp.up": "int4_g128", "mlp.gate": "int4_g128", "attn.out": "bf16", "mlp.down": "fp16"}
    plan = planned(loaded, lambda site: schemes.get(site.role, "as_loaded"))
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32")
    edit(
        tmp_path / "out",
        lambda t: (
            t.update({"model.norm.weight": t["model.norm.weight"].bfloat16().float()})
            or t.update({"lm_head.weight": (t["lm_head.weight"] * 1.5).bfloat16().float()})
        ),
    )
    found = look(tmp_path / "out", loaded)
    raise_if_refused(found)
    again = plan_of(found, loaded, text)
    chosen = {choice.role: choice.scheme for choice in again.sites}
    assert (chosen["attn.out"], chosen["mlp.down"], chosen["attn.k"]) == ("bf16:plain", "fp16:plain", "as_loaded")
    assert chosen["lm_head"] == "bf16:tensor:fp32"
    expected, runs = apply(plan, loaded), apply(again, loaded)
    for site in found.sites:
        if site.role != "lm_head":
            assert torch.equal(runs.get_parameter(site.parameter), expected.get_parameter(site.parameter)), site.name


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(make_tiny_folder: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    foreign.write(folder, make_tiny_folder("llama"), _GPTQ, foreign.gptq())
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_truncated_file_is_named(checkpoint: Path, reference: LoadedModel) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        look(checkpoint, reference)


def test_a_missing_shard_is_named(checkpoint: Path, reference: LoadedModel) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00001-of-00001\.safetensors"):
        look(checkpoint, reference)


def test_a_tensor_that_is_missing_is_named(checkpoint: Path, text: ProofText, reference: LoadedModel) -> None:
    edit(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    found = look(checkpoint, reference)
    assert found.refused == {"model.layers.1.mlp.up_proj": "it lacks the tensor 'model.layers.1.mlp.up_proj.scales'"}
    with pytest.raises(ModelError, match=r"mlp\.up_proj: it lacks the tensor"):
        raise_if_refused(found)
    whole = without_refused(found)
    assert not whole.refused and "left out" in whole.notes[-1]
    plan = plan_of(whole, reference, text)
    assert plan.site("model.layers.1.mlp.up_proj").scheme == "as_loaded"


def test_nothing_quantised_is_nothing_to_import(make_tiny_folder: Any, reference: LoadedModel) -> None:
    with pytest.raises(ModelError, match="nothing to import"):
        look(make_tiny_folder("llama"), reference)


def test_another_reference_is_refused_with_both_shapes(checkpoint: Path, make_tiny_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give the model that it was quantised from"):
        look(checkpoint, models.load(make_tiny_folder("gpt2")))
    edit(checkpoint, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}))
    found = look(checkpoint, models.load(make_tiny_folder("llama")))
    assert found.refused == {"lm_head": "it is [7, 64] in the checkpoint and [260, 64] in the reference"}


def test_another_quantiser_is_named(checkpoint: Path, reference: LoadedModel) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'bitsandbytes', which is not read; kinds are awq, compressed-tensors"):
        look(checkpoint, reference)


def test_settings_of_two_kinds_are_refused(checkpoint: Path, reference: LoadedModel) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"config_groups": {}, "quant_method": "gptq", "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = look(checkpoint, reference)  # its own word counts
    assert found.kind == "gptq"


def test_groups_by_activation_are_refused(make_tiny_folder: Any, reference: LoadedModel, tmp_path: Path) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0)) // 32
    foreign.write(tmp_path / "model", make_tiny_folder("llama"), _GPTQ, foreign.gptq(order=order))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_proj.*desc_act"):
        raise_if_refused(look(tmp_path / "model", reference))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "5 bits in the layout 'gptq'"),
        ({"checkpoint_format": "marlin"}, "layout 'marlin'"),
    ],
)
def test_layouts_that_are_not_read(checkpoint: Path, reference: LoadedModel, change: Any, message: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] |= change
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        look(checkpoint, reference)


def test_scales_that_are_not_finite_are_refused(checkpoint: Path, reference: LoadedModel) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = torch.inf

    edit(checkpoint, spoil)
    assert "scales have 1 NaN or Inf" in look(checkpoint, reference).refused["model.layers.0.mlp.up_proj"]


def test_a_bias_that_differs_is_refused(make_tiny_folder: Any, tmp_path: Path) -> None:
    reference = models.load(make_tiny_folder("qwen2"))
    foreign.write(tmp_path / "model", make_tiny_folder("qwen2"), _GPTQ, foreign.gptq())
    edit(tmp_path / "model", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    found = look(tmp_path / "model", reference)
    assert found.refused == {
        "model.layers.0.self_attn.q_proj.bias": "it differs from the reference's, and a plan changes matrices only"
    }
