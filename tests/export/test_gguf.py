"""GGUF files: read back by transformers' loader and by the `gguf` package, they hold the plan's codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from small_plans import choice, plan_of
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bitwright import formats, models
from bitwright.errors import ExportError
from bitwright.export import export
from bitwright.export.gguf_types import encode_coded, encode_plain, encode_values
from bitwright.export.gguf_vocabulary import read_vocabulary
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import find_sites
from bitwright.plan import ModelInfo, Plan
from bitwright.quantize import SCHEMES, QTensor

#: Scheme → ggml's type that holds its codes as they are.
EXACT = {
    "int4_g32": "Q4_0",
    "int4_g64": "Q4_0",
    "int3_g64": "Q4_0",
    "int4_g32_min": "Q4_1",
    "int4_g32_zp": "Q5_0",
    "int8_g32": "Q8_0",
    "int8_g64": "Q8_0",
    "fp4_e2m1:g32:e8m0": "MXFP4",
    "uint5:g32:fp16:min": "Q5_1",
    "int5:g32:fp16": "Q5_0",
}
IDS = torch.arange(24).unsqueeze(0)


@pytest.fixture(scope="module")
def loaded(make_tiny_folder: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    made: dict[str, LoadedModel] = {}

    def load(architecture: str) -> LoadedModel:
        if architecture not in made:
            plain = models.load(make_tiny_folder(architecture))
            made[architecture] = replace(plain, tokenizer=tokenizer(_GPT2))
        return made[architecture]

    return load


def plan_for(model: LoadedModel, scheme: str | Callable[[Any], str], **changes: Any) -> Plan:
    sites = [site for site in find_sites(model.model) if site.role not in ("embedding", "lm_head")]
    choices = [choice(site, scheme if isinstance(scheme, str) else scheme(site), **changes) for site in sites]
    return plan_of(choices).replace(model=ModelInfo(name=model.name, hash=model.hash, params=1))


def tensors_of(folder: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}


def some_codes(scheme: str, columns: int) -> QTensor:
    """A matrix of any codes of a scheme under any scales that it stores."""
    weights = SCHEMES[scheme].weights
    assert weights is not None and weights.scaling is not None
    generator = np.random.default_rng(3)
    numbers = formats.table(weights.format)
    shape = weights.scaling.granularity.scale_shape(24, columns)
    scales = formats.round(weights.scaling.scale_format, generator.uniform(0.001, 0.01, shape).astype(np.float32))
    offsets = {
        "symmetric": None,
        "zero_point": generator.integers(0, int(max(numbers)) + 1, shape),
        "minimum": generator.normal(0, 0.02, shape).astype(np.float16),
    }[weights.scaling.symmetry]
    return QTensor(
        scheme=weights,
        codes_NK=torch.from_numpy(generator.choice(numbers[np.isfinite(numbers)], (24, columns)).astype(np.float32)),
        scales_NG=torch.from_numpy(np.asarray(scales, dtype=np.float32)),
        offsets_NG=None if offsets is None else torch.from_numpy(offsets.astype(np.float32)),
    )


@pytest.mark.parametrize("scheme", EXACT)
def test_a_type_that_holds_the_codes_holds_them_exactly(scheme: str) -> None:
    q = some_codes(scheme, 128)
    found = encode_coded(q, q.dequantize())
    assert (found.type.upper(), found.error, found.words) == (EXACT[scheme], 0.0, "the plan's codes")
    values = gguf.dequantize(found.data, gguf.GGMLQuantizationType[EXACT[scheme]])
    np.testing.assert_array_equal(values, q.dequantize().numpy())


@pytest.mark.parametrize(
    ("scheme", "kind", "most"),
    [("int8_w", "q8_0", 3e-4), ("fp8_w", "q8_0", 0.01), ("fp6_w", "q8_0", 0.01), ("nf4_g64", "q6_k", 0.03)],
)
def test_the_nearest_type_says_how_far_off_it_is(scheme: str, kind: str, most: float) -> None:
    q = some_codes(scheme, 512)
    found = encode_coded(q, q.dequantize())
    values = torch.from_numpy(gguf.dequantize(found.data, gguf.GGMLQuantizationType[kind.upper()]))
    off = float((values - q.dequantize()).norm() / q.dequantize().norm())
    assert found.type == kind and found.error == pytest.approx(off, rel=1e-4) and 0 < off < most


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_k_quants_decode_as_the_package_decodes_them(kind: str) -> None:
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(2))
    bits = {"q4_k": 2.4, "q6_k": 4.5}[kind]
    found = encode_values(weight, bits)
    values = torch.from_numpy(gguf.dequantize(found.data, gguf.GGMLQuantizationType[kind.upper()]))
    assert found.type == kind
    assert found.error == pytest.approx(float((values - weight).norm() / weight.norm()), rel=1e-5)


def test_rows_that_no_block_divides_are_stored_without_codes() -> None:
    found = encode_values(torch.randn(4, 50), 4.0)
    assert found.type == "f16" and "50 columns" in found.words
    assert encode_plain(torch.randn(4), torch.float32).words == "as loaded"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("scheme", ["int4_g32", "int8_g32", "mixed"])
def test_the_file_is_the_plan(
    architecture: str, scheme: str, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    model = loaded(architecture)
    mixed = {"attn.q": "int4_g32", "attn.k": "int4_g32_zp", "mlp.down": "int4_g32_min", "mlp.up": "bf16"}
    plan = plan_for(model, scheme if scheme != "mixed" else lambda site: mixed.get(site.role, "int8_g32"))
    report = export(plan, model, "gguf", tmp_path / "out", dtype="fp32")
    read = models.load(tmp_path / "out" / "model.gguf")
    planned = apply(plan, model)
    for site in find_sites(model.model):
        assert torch.equal(read.model.get_parameter(site.parameter), planned.get_parameter(site.parameter)), site.name
    config = {"q_proj.bias", "norm.weight"}
    for name, parameter in planned.named_parameters():
        if name.rpartition(".layers.")[2].partition(".")[2] or name in config:
            assert torch.equal(read.model.get_parameter(name), parameter), name
    # rows of q and k, rotary base, norms' epsilon, heads
    torch.testing.assert_close(read.model(IDS).logits, weights_alone(planned, plan)(IDS).logits)
    assert all("exactly" in note for note in report.notes), report.notes
    assert set(report.files) == {"model.gguf", "gguf_tensors.json"}


def weights_alone(planned: torch.nn.Module, plan: Plan) -> Callable[[Tensor], Any]:
    """The planned model without rounded inputs, which a file does not say."""
    rounding = any(SCHEMES[site.scheme].activations is not None for site in plan.sites)
    if rounding:
        planned._forward_pre_hooks.clear()
        planned._forward_hooks.clear()
        planned._forward_hooks_always_called.clear()
    return planned


def test_what_became_of_each_tensor_is_written_beside_it(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("llama")
    export(plan_for(model, "int4_g32"), model, "gguf", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "gguf_tensors.json").read_text())
    stored = tensors_of(tmp_path / "out")
    assert said.keys() == stored.keys()
    for name, tensor in stored.items():
        assert said[name]["type"].upper() == tensor.tensor_type.name
    assert said["blk.1.ffn_down.weight"] == {
        "type": "q4_0",
        "how": "the plan's codes",
        "relative_error": 0.0,
        "site": "model.layers.1.mlp.down_proj",
    }


def test_tied_embeddings_are_stored_once(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("qwen2")
    export(plan_for(model, "int8_g32"), model, "gguf", tmp_path / "out")
    assert "token_embd.weight" in (stored := tensors_of(tmp_path / "out")) and "output.weight" not in stored


def test_column_factors_go_into_the_norms(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("llama")
    factors = np.linspace(0.5, 2, 64, dtype=np.float32)
    reading = {"attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"}
    sites = [site for site in find_sites(model.model) if site.role in reading]
    plan = plan_of(
        [choice(site, "int4_g32", transform="awq") for site in sites],
        {f"{site.name}/column_scales": factors for site in sites},
    ).replace(model=ModelInfo(name=model.name, hash=model.hash, params=1))
    report = export(plan, model, "gguf", tmp_path / "out")
    assert any(note.startswith("Q4_0 holds the plan's codes, exactly") for note in report.notes)
    read = models.load(tmp_path / "out" / "model.gguf")
    torch.testing.assert_close(
        read.model.get_parameter("model.norm.weight"), model.model.get_parameter("model.norm.weight")
    )
    torch.testing.assert_close(read.model(IDS).logits, apply(plan, model)(IDS).logits, rtol=1e-3, atol=1e-4)


def test_a_rotated_matrix_is_rounded_again(loaded: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model = loaded("llama")
    sites = [site for site in find_sites(model.model) if site.role == "mlp.down"]
    plan = plan_of(
        [choice(site, "int4_g32", transform="hadamard") for site in sites],
        {f"{site.name}/signs": np.ones(96, dtype=np.int8) for site in sites},
    ).replace(model=ModelInfo(name=model.name, hash=model.hash, params=1))
    (note,) = [n for n in export(plan, model, "gguf", tmp_path / "out").notes if "down_proj" in n and "again" in n]
    assert "of the weights off" in note


def test_rotary_frequencies_that_differ_become_factors(make_tiny_model: Any, tiny_tokenizer: Any) -> None:
    import transformers

    from bitwright.export.gguf_metadata import rotary_factors

    plain = make_tiny_model("llama")
    assert rotary_factors(plain) is None
    config = plain.config.__class__(
        **{
            **plain.config.to_dict(),
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
    )
    factors = rotary_factors(transformers.LlamaForCausalLM(config))
    assert factors is not None and factors.shape == (8,)
    # by the definition of llama 3: short waves stay, long ones are stretched by the factor
    assert float(factors[0]) == pytest.approx(1.0) and float(factors[-1]) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("scheme", "kind"), [("int8_token_g32", "q8_0"), ("int4_token_g32", "q4_1"), ("fp16_values", "f16")]
)
def test_caches_are_an_option_of_llama_cpp(
    scheme: str, kind: str, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from bitwright.models.loaded import from_memory
    from bitwright.models.value_sites import find_value_sites

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 260}
    model = from_memory(
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)), loaded("llama").tokenizer, name="heads of 32"
    )
    caches = [choice(site, scheme) for site in find_value_sites(model.model) if site.role == "kv_cache"]
    plan = plan_of(caches).replace(model=ModelInfo(name=model.name, hash=model.hash, params=1))
    notes = export(plan, model, "gguf", tmp_path / "out").notes
    assert any(note.endswith(f"llama.cpp with --cache-type-k {kind} --cache-type-v {kind}") for note in notes)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "scheme", "message"),
    [
        ("phi3", "int4_g32", "GGUF is written for llama, mistral, qwen2, and not for 'phi3'"),
        ("llama", "int8", "llama.cpp rounds inputs in its own way"),
        ("llama", "mxfp4", "llama.cpp rounds inputs in its own way"),
    ],
)
def test_refused(
    architecture: str, scheme: str, message: str, loaded: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    model = loaded(architecture)
    with pytest.raises(ExportError, match=message):
        export(plan_for(model, scheme), model, "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- tokenizers -------------------------------------------------------------------------------------------------------

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_QUIET = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(splitting: Any) -> PreTrainedTokenizerFast:
    """Of 260 tokens: bytes, two merges, one special and one plain token that was added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: rank for rank, letter in enumerate([*alphabet, "ab", "abc"])}
    made = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[("a", "b"), ("ab", "c")]))
    made.pre_tokenizer = splitting
    made.add_special_tokens(["<end>"])
    made.add_tokens(["plain"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


@pytest.mark.parametrize(
    ("splitting", "name"),
    [
        (_GPT2, "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]), "smollm"),
        (pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_QWEN2), "isolated"), _QUIET]), "qwen2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")), "isolated"), _QUIET]
            ),
            "llama-bpe",
        ),
    ],
)
def test_splitting_is_told_by_what_it_splits_by(splitting: Any, name: str) -> None:
    found = read_vocabulary(tokenizer(splitting), 262)
    assert found.splitter == name and found.model == "gpt2"
    assert found.tokens[256:] == ("ab", "abc", "<end>", "plain", "[PAD260]", "[PAD261]")
    assert found.kinds[256:] == (1, 1, 3, 4, 5, 5)
    assert found.merges == ("a b", "ab c") and found.special_ids["eos_token_id"] == 258
    assert (found.adds_bos, found.adds_eos, found.adds_space) == (False, False, False)


def test_another_way_of_splitting_is_refused() -> None:
    with pytest.raises(ExportError, match="splits text by 'Whitespace'"):
        read_vocabulary(tokenizer(pre_tokenizers.Whitespace()), 0)


def test_pieces_have_scores_in_the_order_of_merges() -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "<0x41>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6, "▁ab": 7}
    made = Tokenizer(
        tokenizer_models.BPE(
            vocab=vocabulary, merges=[("▁", "a"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Replace("▁", " ")
    found = read_vocabulary(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>"), 8)
    assert (found.model, found.splitter, found.adds_space) == ("llama", "default", True)
    assert found.kinds[2:] == (6, 1, 1, 1, 1, 1)
    assert found.scores[6] == 0 and found.scores[7] == -1 and max(found.scores[:6]) < -1
