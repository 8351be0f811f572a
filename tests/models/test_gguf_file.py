"""GGUF files written by the ``gguf`` package itself, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from bitwright import models
from bitwright.errors import ModelError
from bitwright.models.gguf_file import read_gguf_header

#: HF name → GGUF name of one layer (docs/gguf.md, "Standardized tensor names").
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NUM_HEADS = {"attn_q": 4, "attn_k": 2}


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of q and k in a GGUF file (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, *, kind=gguf.GGMLQuantizationType.F32, architecture="llama", leave_out=()):
    """Write the tiny Llama: matrices of the layers as ``kind`` (where rows divide by its block), the rest in F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:255]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "ab", "<eos>", "<a>", "<b>", "<c>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 4)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    state = {name: p.detach().numpy() for name, p in model.named_parameters()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output.weight": state["lm_head.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    for layer in range(2):
        for hf_name, gguf_name in LAYER_NAMES.items():
            weight = state[f"model.layers.{layer}.{hf_name}.weight"]
            heads = NUM_HEADS.get(gguf_name)
            tensors[f"blk.{layer}.{gguf_name}.weight"] = llama_cpp_rows(weight, heads) if heads else weight
    for name, weight in tensors.items():
        if name in leave_out:
            continue
        if weight.ndim == 2 and name.startswith("blk"):
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(make_tiny_model):
    return make_tiny_model("llama")


def test_fp32_file_gives_back_the_model(llama, tmp_path, capfd):
    loaded = models.load(write_gguf(tmp_path / "tiny.gguf", llama))
    assert capfd.readouterr() == ("", "")
    assert loaded.name == "tiny"
    assert loaded.hash == models.hash_weights(llama)
    assert loaded.tokenizer.encode("ab") == [255] and loaded.tokenizer.eos_token_id == 256
    ids = torch.arange(30).reshape(2, 15)
    torch.testing.assert_close(loaded.model(ids).logits, llama(ids).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "kind, name, bits",
    [
        (gguf.GGMLQuantizationType.Q4_1, "q4_1", 5.0),  # 32 · 4 bits + two fp16 = 160 bits
        (gguf.GGMLQuantizationType.Q4_0, "q4_0", 4.5),
        (gguf.GGMLQuantizationType.Q8_0, "q8_0", 8.5),
        (gguf.GGMLQuantizationType.F16, "fp16", 16.0),
        (gguf.GGMLQuantizationType.BF16, "bf16", 16.0),
    ],
)
def test_dequantisation_is_that_of_the_gguf_package(kind, name, bits, llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, kind=kind)
    loaded = models.load(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name != "blk.1.ffn_down.weight":
            continue
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(loaded.model.model.layers[1].mlp.down_proj.weight.numpy(), expected)
    q = loaded.model.model.layers[0].self_attn.q_proj.weight.numpy()
    exact = llama.model.layers[0].self_attn.q_proj.weight.numpy()
    assert np.abs(q - exact).max() < np.abs(exact).max() / 8  # rows in their places, values rounded
    assert loaded.loaded_format["model.layers.0.mlp.up_proj.weight"] == name
    assert loaded.loaded_bits["model.layers.0.mlp.up_proj.weight"] == bits
    assert loaded.loaded_format["model.norm.weight"] == "fp32"


def test_loaded_model_can_be_saved_and_loaded_again(llama, tmp_path):
    loaded = models.load(write_gguf(tmp_path / "tiny.gguf", llama, kind=gguf.GGMLQuantizationType.Q4_1))
    loaded.model.save_pretrained(tmp_path / "saved")
    loaded.tokenizer.save_pretrained(tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    assert again.hash == loaded.hash
    (note,) = loaded.notes
    assert note == (
        "weights already lie on a 4-bit grid of 32 (code·scale + minimum): int4_g32_min reproduces them exactly"
    )
    assert again.notes == loaded.notes


def test_header_agrees_with_the_gguf_package(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, kind=gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(path)
    header = read_gguf_header(path)
    assert header.architecture == "llama"
    assert [(t.name, t.shape, t.first_byte, t.num_bytes) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in reversed(t.shape)), int(t.data_offset), int(t.n_bytes)) for t in reader.tensors
    ]


def test_unsupported_architecture_is_named_with_those_supported(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, architecture="rwkv7")
    with pytest.raises(ModelError, match=r"GGUF architecture 'rwkv7' is not supported; supported are .*gemma2.*llama"):
        models.load(path)


def test_every_truncation_is_refused_by_name(llama, tmp_path):
    whole = write_gguf(tmp_path / "tiny.gguf", llama).read_bytes()
    path = tmp_path / "short.gguf"
    for num_bytes in (5, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=r"short\.gguf is truncated: .*; download it again"):
            models.load(path)


def test_other_bad_files(llama, tmp_path):
    path = tmp_path / "bad.gguf"
    for content in (b"", b"GG", b"not a model at all"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.gguf is no GGUF file"):
            models.load(path)
    path.write_bytes(b"GGUF" + (7).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelError, match="GGUF version 7; versions 2 and 3 are read"):
        models.load(path)
    write_gguf(path, llama, leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*'model\.layers\.1\.mlp\.up_proj\.weight'"):
        models.load(path)
