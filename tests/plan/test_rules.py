"""Rules against facts from outside: data sheets, torch's refusals, engines' sources (`/docs` of each are cited)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from bitwright import hardware
from bitwright.errors import PlanError, UnknownName
from bitwright.models import find_sites
from bitwright.plan import rules
from bitwright.plan.engine import Engine, read_engine, read_engine_file
from bitwright.plan.rules import engines, get_engine, negative_scales_allowed, remarks, ruled_out, ties, why_not
from bitwright.quantize import SCHEMES, TRANSFORMS, VALUE_SCHEMES


@dataclass(frozen=True)
class At:
    """A site's facts."""

    name: str = "model.layers.0.mlp.down_proj"
    role: str = "mlp.down"
    module: str = "model.layers.0.mlp.down_proj"
    tied_group: str | None = None
    shape: tuple[int, int] = (4096, 4096)


def on_device(device: str, scheme: str, shape: tuple[int, int] = (4096, 4096)) -> str | None:
    return why_not(At(shape=shape), SCHEMES[scheme], device=hardware.get(device))


def on_engine(engine: str, scheme: str, shape: tuple[int, int] = (4096, 4096), role: str = "mlp.down") -> str | None:
    return why_not(At(shape=shape, role=role), SCHEMES[scheme], engine=get_engine(engine))


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "scheme", "says"),
    [
        # Volta's tensor cores multiply fp16 only
        (
            "v100",
            "bf16",
            "v100-sxm2 has no matrix unit for bf16: it would be computed in fp32 at 15.7 TFLOP/s, while fp",
        ),
        ("v100", "int8", "no matrix unit for int8"),
        # Ampere has no FP8
        ("a100", "fp8", "a100-sxm has no matrix unit for fp8_e4m3"),
        ("rtx-3090", "fp8_static", "no matrix unit for fp8_e4m3"),
        # MI300 has the FNUZ types, MI350 the OCP ones
        ("mi300x", "fp8", "its formats of that width are fp8_e4m3fnuz, fp8_e5m2fnuz"),
        # MX products came with Blackwell
        ("h100", "mxfp8", "applies no e8m0 scales per 32 along in_features to fp8_e4m3 products"),
        ("h100", "nvfp4", "no matrix unit for fp4_e2m1"),
        ("tpu-v5e", "fp16", "nor for a wider format that holds it"),
    ],
)
def test_what_a_chip_lacks_is_ruled_out(device: str, scheme: str, says: str) -> None:
    reason = on_device(device, scheme)
    assert reason is not None and says in reason


@pytest.mark.parametrize(
    ("device", "scheme"),
    [
        ("v100", "fp16"),
        ("v100", "int4_g128"),
        ("a100", "bf16"),
        ("a100", "int8"),
        ("a100", "fp8_w"),  # weights alone are widened: vLLM runs them so through Marlin
        ("mi300x", "fp8_w"),
        ("mi355x", "fp8"),
        ("h100", "fp8"),
        ("h100", "fp8_block"),
        ("b200", "mxfp4"),
        ("b200", "nvfp4"),
        ("x86-avx2", "bf16"),  # computed in fp32, which is the fastest it has
        ("v100", "as_loaded"),
    ],
)
def test_what_a_chip_has_is_allowed(device: str, scheme: str) -> None:
    assert on_device(device, scheme) is None


@pytest.mark.parametrize(
    ("device", "scheme", "shape", "says"),
    [
        # torch._scaled_mm: "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (512x1368)"
        ("h100", "fp8", (4096, 1368), "in_features that are multiples of 16, not 1368"),
        ("h100", "fp8", (1368, 4096), "out_features that are multiples of 16, not 1368"),
        ("h100", "fp8", (576, 576), None),
        # FP8 in blocks of 128: both sizes are multiples of 128
        ("h100", "fp8_block", (576, 512), "with scales per 128 for out_features that are multiples of 128, not 576"),
        ("h100", "fp8_block", (512, 576), "in_features that are multiples of 128, not 576"),
        # MXFP8: both sizes are multiples of 32
        ("b200", "mxfp8", (576, 1536), None),
        ("b200", "mxfp8", (16, 1536), "out_features that are multiples of 32, not 16"),
        ("b200", "mxfp8", (1536, 48), "in_features that are multiples of 32, not 48"),
        # weights alone have no such limits
        ("h100", "int4_g128", (17, 13), None),
    ],
)
def test_shapes_follow_the_unit(device: str, scheme: str, shape: tuple[int, int], says: str | None) -> None:
    reason = on_device(device, scheme, shape)
    assert reason is None if says is None else says in str(reason)


def test_an_accumulator_is_a_remark_and_no_reason() -> None:
    assert any("keeps 14 significant bits" in text for text in remarks(SCHEMES["fp8"], device=hardware.get("h100")))
    # partial sums of 128 leave the tensor core: that is what the blocks are for
    assert remarks(SCHEMES["fp8_block"], device=hardware.get("h100")) == ()
    assert remarks(SCHEMES["fp8"], device=hardware.get("b200")) == ()
    assert remarks(SCHEMES["fp8_w"], device=hardware.get("h100")) == ()


@pytest.mark.parametrize("device", ["gaudi-3", "tpu-v6e"])
def test_eight_bits_that_are_no_faster_are_a_remark(device: str) -> None:
    (text,) = remarks(SCHEMES["fp8"], device=hardware.get(device))
    assert "it saves memory, not arithmetic" in text


def test_values_need_a_unit_where_they_are_multiplied() -> None:
    product = At(name="a:qk", role="attn.qk", shape=(8, 128))
    cache = At(name="a:k_cache", role="kv_cache", shape=(8, 128))
    fp8 = VALUE_SCHEMES["fp8_e4m3_head"]
    assert "no matrix unit for fp8_e4m3" in str(why_not(product, fp8, device=hardware.get("a100")))
    assert why_not(product, fp8, device=hardware.get("h100")) is None
    assert why_not(cache, fp8, device=hardware.get("a100")) is None
    assert "no matrix unit for bf16" in str(why_not(product, VALUE_SCHEMES["bf16_values"], device=hardware.get("v100")))


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", engines(), ids=lambda engine: engine.name)
class TestEveryEngine:
    """Laws of the catalog."""

    def test_statements_have_sources(self, engine: Engine) -> None:
        sections = (engine, *engine.fused, *engine.weights, *engine.values, *engine.transforms)
        assert all(len(section.source) > 10 for section in sections)

    def test_names_and_aliases_find_it(self, engine: Engine) -> None:
        assert all(get_engine(name.upper()) is engine for name in (engine.name, *engine.aliases))

    def test_something_runs_and_everything_else_has_a_reason(self, engine: Engine) -> None:
        reasons = {name: why_not(At(), scheme, engine=engine) for name, scheme in SCHEMES.items()}
        assert reasons["as_loaded"] is reasons["bf16"] is reasons["fp16"] is None
        assert sum(reason is None for reason in reasons.values()) > 5
        assert all(reason.startswith(f"{engine.name} ") for reason in reasons.values() if reason)

    def test_groups_that_do_not_divide_are_refused(self, engine: Engine) -> None:
        for name in ("int4_g128", "int4_g64", "int4_g32"):
            scheme = SCHEMES[name]
            if why_not(At(), scheme, engine=engine) is None:
                assert "do not divide" in str(why_not(At(shape=(64, 48)), scheme, engine=engine))


def test_vllm_takes_576_columns_in_groups_of_64_only() -> None:
    assert on_engine("vllm", "int4_g128", (576, 576)) == (
        "vllm refuses groups of 128 in 576 columns, which they do not divide"
    )
    assert on_engine("vllm", "int4_g64", (576, 576)) is None
    # 11008 / 4 ways of tensor parallelism = 2752, which 128 does not divide
    assert on_engine("vllm", "int4_g128", (4096, 11008)) is None
    assert on_engine("vllm", "int4_g128", (4096, 2752)) is not None


@pytest.mark.parametrize(
    ("engine", "scheme", "says"),
    [
        # marlin_utils: with zero points uint4 only, scales in the dtype of the parameters; no floating minimum
        ("vllm", "int4_g128_zp", None),
        ("vllm", "int4_g128_min", "runs uint4 with a zero point, not with a minimum"),
        ("vllm", "int3_g64", "has no int3 weights"),
        ("vllm", "int8_w", None),  # scales are converted to the dtype of the model
        ("vllm", "int8", None),
        ("vllm", "fp8_static", None),
        ("vllm", "fp8_block", None),
        # ggml's blocks have 32 numbers: Q4_0 and Q4_1
        ("llama.cpp", "int4_g32", None),
        ("llama.cpp", "int4_g32_min", None),
        ("llama.cpp", "int4_g128", "runs int4 in groups of 32, not of 128"),
        ("llama.cpp", "int4_g32_zp", "runs uint4 with a minimum, not with a zero point"),
        ("llama.cpp", "fp8", "has no fp8_e4m3 weights"),
        ("llama.cpp", "int8", "runs int8 weights with inputs that are not rounded, not with inputs in int8"),
        # TensorRT-LLM: FP8 rowwise is a recipe, FP8 weights alone are none
        ("tensorrt-llm", "fp8", None),
        ("tensorrt-llm", "fp8_w", "not with inputs that are not rounded"),
        # ModelOpt's checkpoints hold the inputs' tensor scale; blocks' scales are found on every call
        ("tensorrt-llm", "nvfp4_static", None),
        ("tensorrt-llm", "nvfp4", "with static scales, not dynamic ones"),
        ("vllm", "nvfp4_static", None),
        ("vllm", "nvfp4_w", None),
        ("vllm", "nvfp4", "with static scales, not dynamic ones"),
        ("vllm", "mxfp4_w", None),
        ("torchao", "nvfp4", None),
        ("torchao", "nvfp4_static", None),
        # activation_dtype has to be weight_dtype
        ("torchao", "fp8_e4m3:g32:e8m0|fp4_e2m1:g32:e8m0", "not with inputs in fp4_e2m1"),
        ("tensorrt-llm", "int4_g64", "runs int4 in groups of 128, not of 64"),
        ("torchao", "int4_g128_min", "runs uint4 with scales in bf16, not in fp16"),
        ("torchao", "int3_g64", None),
        ("torchao", "int8_static", "not per tensor"),
        ("transformers", "int4_g128", None),
        ("transformers", "fp6_w", "has no fp6_e3m2 weights"),
        ("transformers", "mxfp4", None),
        ("transformers", "mxfp8", None),
        ("transformers", "nvfp4_w", None),
        ("transformers", "nvfp4_static", None),
    ],
)
def test_known_schemes(engine: str, scheme: str, says: str | None) -> None:
    reason = on_engine(engine, scheme)
    assert reason is None if says is None else says in str(reason)


def test_blocks_of_inputs_divide_the_columns_where_they_are_views() -> None:
    # compressed-tensors unflattens inputs; vLLM's block kernels take sizes that 128 does not divide
    assert "do not divide" in str(on_engine("transformers", "fp8_block", (4096, 4000)))
    assert on_engine("transformers", "fp8_block", (4000, 4096)) is None
    assert on_engine("vllm", "fp8_block", (4096, 4000)) is None


def test_experts_have_kernels_of_their_own() -> None:
    # get_moe_method: int4 and int8 without rounded inputs, fp8 and int8 with inputs per token; no fp8 alone
    assert on_engine("vllm", "int4_g64", role="expert.gate") is None
    assert on_engine("vllm", "fp8", role="expert.down") is None
    assert on_engine("vllm", "fp8_w", role="expert.gate") == "vllm does not run W8A16, FP8 at expert.gate"
    assert on_engine("vllm", "int8_static", role="expert.up") is not None
    assert on_engine("transformers", "int4_g64_zp", role="expert.up") is not None
    assert on_engine("transformers", "fp8_w", role="expert.up") is None


def test_embedding_and_head_are_kept_where_nothing_quantises_them() -> None:
    assert on_engine("vllm", "int4_g64", role="embedding") == "vllm keeps embedding in fp16, bf16 or fp32"
    assert on_engine("vllm", "bf16", role="embedding") is None
    # ParallelLMHead takes a scheme as any linear layer does
    assert on_engine("vllm", "int4_g64", role="lm_head") is None
    # llama-quantize has --token-embedding-type and --output-tensor-type
    assert on_engine("llama.cpp", "int4_g32", role="embedding") is None


@pytest.mark.parametrize(
    ("engine", "scheme", "says"),
    [
        # docs.vllm.ai, Quantized KV Cache: one scale per tensor or per attention head
        ("vllm", "fp8_e4m3_tensor", None),
        ("vllm", "fp8_e4m3_head", None),
        # its kernels for CPUs; those for GPUs and others' round to nearest
        ("vllm", "fp8_e4m3_tensor_truncated", None),
        ("tensorrt-llm", "fp8_e4m3_tensor_truncated", "rounds its FP8 KV cache nearest_even, not toward_zero"),
        # compressed-tensors' hook finds no attention of transformers 5.24, so that nothing is rounded
        ("transformers", "fp8_e4m3_head", "not in fp8_e4m3"),
        ("vllm", "fp8_e4m3_token", "with scales per tensor or head, not per token"),
        ("vllm", "int8_token", "in fp8_e4m3, not in int8"),
        ("llama.cpp", "int4_token_g32", None),
        ("llama.cpp", "int4_token", "in groups of 32, not without"),
        ("llama.cpp", "fp8_e4m3_tensor", "not in fp8_e4m3"),
        ("tensorrt-llm", "fp8_e4m3_tensor", None),
        ("torchao", "int8_token", "torchao has no rounded kv_cache: it stays in fp32, fp16 or bf16"),
        ("vllm", "bf16_values", None),
    ],
)
def test_known_caches(engine: str, scheme: str, says: str | None) -> None:
    cache = At(name="model.layers.0.self_attn:k_cache", role="kv_cache", shape=(8, 128))
    reason = why_not(cache, VALUE_SCHEMES[scheme], engine=get_engine(engine))
    assert reason is None if says is None else says in str(reason)


def test_ggml_blocks_divide_a_head() -> None:
    cache = At(name="model.layers.0.self_attn:k_cache", role="kv_cache", shape=(8, 80))
    reason = why_not(cache, VALUE_SCHEMES["int4_token_g32"], engine=get_engine("llama.cpp"))
    assert reason == "llama.cpp refuses groups of 32 in 80 numbers, which they do not divide"


def test_some_values_are_computed_in_fp32() -> None:
    total = At(name="a:softmax_sum", role="attn.softmax_sum", shape=(8, 1))
    assert why_not(total, VALUE_SCHEMES["bf16_values"], engine=get_engine("vllm")) == (
        "vllm computes attn.softmax_sum in fp32"
    )


def test_transforms_are_applied_where_an_engine_can() -> None:
    def reason(engine: str, transform: str, role: str) -> str | None:
        site = At(role=role)
        return why_not(site, SCHEMES["bf16"], engine=get_engine(engine), transform=TRANSFORMS[transform])

    assert reason("vllm", "awq", "attn.q") is None
    assert "at attn.q, attn.k, attn.v" in str(reason("vllm", "awq", "mlp.down"))
    assert reason("vllm", "hadamard", "mlp.down") == "vllm cannot apply hadamard to the inputs of a layer"
    for engine in ("transformers", "torchao", "tensorrt-llm"):
        assert reason(engine, "hadamard", "attn.q") == f"{engine} cannot apply hadamard to the inputs of a layer"
    assert reason("torchao", "awq", "attn.q") is None and reason("torchao", "awq", "mlp.down") is not None
    assert reason("llama.cpp", "hadamard", "attn.q") == "llama.cpp cannot apply hadamard to the inputs of a layer"
    assert reason("llama.cpp", "none", "attn.q") is None


def test_only_ggml_stores_negative_scales() -> None:
    assert negative_scales_allowed(SCHEMES["int4_g32"], get_engine("llama.cpp"))
    assert not negative_scales_allowed(SCHEMES["int4_g32"], get_engine("vllm"))
    assert not negative_scales_allowed(SCHEMES["int4_g128"], get_engine("llama.cpp"))
    assert not negative_scales_allowed(SCHEMES["bf16"], get_engine("llama.cpp"))


def test_reasons_are_grouped() -> None:
    sites = [At(name=f"model.layers.{i}.mlp.up_proj", role="mlp.up", shape=(1536, 576)) for i in range(30)]
    sites.append(At(name="model.layers.0.mlp.down_proj", role="mlp.down", shape=(576, 1536)))
    found = ruled_out(sites, [SCHEMES["int4_g128"], SCHEMES["int4_g64"]], engine=get_engine("vllm"))
    assert [str(entry) for entry in found] == [
        "int4_g128 at 30 sites (mlp.up): vllm refuses groups of 128 in 576 columns, which they do not divide"
    ]
    assert found[0].sites == tuple(site.name for site in sites[:30])
    (lone,) = ruled_out(sites[:1], [SCHEMES["int3_g64"]], engine=get_engine("vllm"))
    assert str(lone) == "int3_g64 at model.layers.0.mlp.up_proj: vllm has no int3 weights"


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        # benchmarks/results/vllm.json: what vLLM ran on such a processor, and what it refused
        ("int4_g64", None),
        ("int4_g32_zp", None),
        ("int8", None),
        ("fp8", None),
        ("bf16", None),
        ("int8_w", "vllm has no kernel for WNA16, 8 bits on a CPU (x86-avx512-bf16)"),
        ("fp8_w", "vllm has no kernel for W8A16, FP8 on a CPU (x86-avx512-bf16)"),
        ("mxfp4", "vllm has no kernel for MXFP4 on a CPU (x86-avx512-bf16)"),
        ("fp8_block", "vllm has no kernel for W8A8, FP8 in blocks on x86-avx512-bf16: it needs amx_tile"),
    ],
)
def test_kernels_of_vllm_on_a_cpu(scheme: str, says: str | None) -> None:
    cpu, vllm = hardware.get("x86-avx512-bf16"), get_engine("vllm")
    assert why_not(At(), SCHEMES[scheme], engine=vllm, kernels_on=cpu) == says
    assert why_not(At(), SCHEMES[scheme], engine=vllm) is None  # of no device in particular
    assert why_not(At(), SCHEMES[scheme], engine=vllm, kernels_on=hardware.get("b200")) is None


def test_kernels_ask_for_other_sizes_on_a_cpu() -> None:
    """kernels/linear/mixed_precision/cpu.py of vLLM: multiples of 32; Marlin fills up with zeros."""
    site, vllm = At(shape=(40, 128)), get_engine("vllm")
    assert why_not(site, SCHEMES["int4_g64"], engine=vllm, kernels_on=hardware.get("h100")) is None
    reason = why_not(site, SCHEMES["int4_g64"], engine=vllm, kernels_on=hardware.get("x86-avx512-bf16"))
    assert reason == "vllm takes WNA16, symmetric, on a CPU with out_features a multiple of 32, not 40"
    amx = why_not(site, SCHEMES["fp8_block"], engine=vllm, kernels_on=hardware.get("x86-amx"))
    assert amx is None  # torch.cpu._is_amx_tile_supported


@pytest.mark.parametrize(
    ("device", "scheme", "says"),
    [
        ("h100", "fp8", None),
        ("l4", "fp8", "needs a compute capability of 9.0, not 8.9"),
        ("b200", "fp8", "needs a compute capability of 9.0, not 10.0"),
        ("b200", "nvfp4_static", None),
        ("h100", "nvfp4_static", "needs a compute capability of 10.0 or more, not 9.0"),
        ("a100", "int4_g128", None),
        ("v100-sxm2", "int4_g128", "needs a compute capability of 8.0 or more, not 7.0"),
        ("x86-amx", "int4_g128", "tensorrt-llm runs on a GPU, and not on x86-amx"),
        ("x86-amx", "bf16", "tensorrt-llm runs on a GPU, and not on x86-amx"),
        ("mi300x", "int4_g128", None),  # no such number: nothing is ruled out by it
    ],
)
def test_kernels_of_tensorrt_llm(device: str, scheme: str, says: str | None) -> None:
    """The support matrices of TensorRT-LLM and ModelOpt, with the numbers of NVIDIA's list of GPUs."""
    reason = why_not(
        At(shape=(4096, 4096)), SCHEMES[scheme], engine=get_engine("tensorrt-llm"), kernels_on=hardware.get(device)
    )
    assert reason == says if says is None else says in str(reason)


def test_a_cache_that_a_cpu_rounds_otherwise() -> None:
    cache = At(role="kv_cache", shape=(8, 128))
    for device, rounded, cut in (("h100", True, False), ("x86-amx", False, True)):
        for scheme, runs in (("fp8_e4m3_tensor", rounded), ("fp8_e4m3_tensor_truncated", cut)):
            reason = why_not(cache, VALUE_SCHEMES[scheme], engine=get_engine("vllm"), kernels_on=hardware.get(device))
            assert (reason is None) == runs
            assert runs or "has no kernel for FP8 KV cache" in str(reason)


def test_the_device_speaks_before_the_engine() -> None:
    reason = why_not(At(), SCHEMES["fp8"], device=hardware.get("a100"), engine=get_engine("llama.cpp"))
    assert reason == "a100-sxm has no matrix unit for fp8_e4m3"


# --- ties ------------------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def groups_of(assigned: dict[str, str]) -> set[frozenset[str]]:
    groups: dict[str, set[str]] = {}
    for site, group in assigned.items():
        groups.setdefault(group, set()).add(site)
    return {frozenset(members) for members in groups.values()}


def test_vllm_fuses_qkv_and_gate_up() -> None:
    sites = find_sites(LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48)))
    expected = set()
    for layer in ("model.layers.0", "model.layers.1"):
        expected.add(frozenset(f"{layer}.self_attn.{part}_proj" for part in "qkv"))
        expected.add(frozenset(f"{layer}.mlp.{part}_proj" for part in ("gate", "up")))
    assert groups_of(ties(sites, get_engine("vllm"))) == expected
    assert groups_of(ties(sites, get_engine("tensorrt-llm"))) == expected
    assert ties(sites, get_engine("llama.cpp")) == ties(sites, None) == {}


def test_parts_of_one_matrix_stay_together_everywhere() -> None:
    sites = find_sites(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64)))
    whole = frozenset(f"transformer.h.0.attn.c_attn[{part}]" for part in "qkv")
    for engine in (None, *engines()):
        assert whole in groups_of(ties(sites, engine))


def test_experts_of_a_layer_share_a_scheme_in_fused_kernels() -> None:
    config = MixtralConfig(**TINY, intermediate_size=48, num_key_value_heads=2, num_local_experts=3)
    sites = find_sites(MixtralForCausalLM(config))
    grouped = groups_of(ties(sites, get_engine("vllm")))
    experts = frozenset(site.name for site in sites if site.role.startswith("expert.") and ".layers.0." in site.name)
    assert len(experts) >= 6
    assert experts in grouped


def test_caches_are_tied_as_the_engine_sets_them() -> None:
    caches = [
        At(name=f"model.layers.{i}.self_attn:{part}", role="kv_cache", module=f"model.layers.{i}.self_attn")
        for i in range(2)
        for part in ("k_cache", "v_cache")
    ]
    assert len(groups_of(ties(caches, get_engine("vllm")))) == 1
    assert groups_of(ties(caches, get_engine("llama.cpp"))) == {
        frozenset(f"model.layers.{i}.self_attn:{part}" for i in range(2)) for part in ("k_cache", "v_cache")
    }
    assert ties(caches, None) == {}


def test_an_engine_of_one_scheme_ties_everything() -> None:
    one = get_engine("llama.cpp").model_copy(update={"mixes_schemes": False, "kept_roles": ("lm_head",)})
    sites = find_sites(LlamaForCausalLM(LlamaConfig(**TINY, intermediate_size=48)))
    (group,) = groups_of(ties(sites, one))
    assert group == {site.name for site in sites if site.role != "lm_head"}


# --- files -----------------------------------------------------------------------------------------------------------

GOOD = """
name = "toy"
description = "nothing"
plain_formats = ["bf16"]
source = "a table"
certainty = "read"

[[weights]]
name = "W4"
formats = ["int4"]
scopes = ["group"]
source = "a table"
certainty = "read"
"""


def test_a_users_engine_is_read(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text(GOOD)
    engine = read_engine_file(tmp_path / "toy.toml")
    assert why_not(At(), SCHEMES["int4_g128"], engine=engine) is None
    assert why_not(At(), SCHEMES["fp16"], engine=engine) == "toy has no fp16 without scales; it has bf16"
    with pytest.raises(PlanError, match=r"nowhere\.toml' cannot be read"):
        read_engine_file(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"int4"', '"int44"', r"'toy\.toml': field 'weights\.0\.formats': .*no format is named 'int44'; did you mean"),
        ('scopes = ["group"]', 'scopes = ["rows"]', r"field 'weights\.0\.scopes\.0'"),
        ('certainty = "read"', 'certainty = "sure"', r"field 'certainty'"),
        ('source = "a table"\n', "", r"field 'source'"),
        ('name = "W4"', 'name = "W4"\ncolour = 1', r"field 'weights\.0\.colour'"),
        ("[[weights]]", "[[weights", r"is no TOML"),
    ],
)
def test_a_wrong_file_names_the_field(old: str, new: str, says: str) -> None:
    assert old in GOOD
    with pytest.raises(PlanError, match=says):
        read_engine(GOOD.replace(old, new), "toy.toml")


def test_unknown_engine_suggests_the_nearest() -> None:
    with pytest.raises(
        UnknownName, match=r"unknown engine 'vlm'; did you mean 'vllm'\? Known engines: llama\.cpp, ten"
    ):
        get_engine("vlm")


def test_rules_load_no_torch() -> None:
    code = f"import sys; import {rules.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
