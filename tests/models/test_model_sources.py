"""Every source of a model, and every way it can be bad."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bitwright import models
from bitwright.errors import ModelError

ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")


@pytest.fixture
def llama_copy(make_tiny_folder, tmp_path) -> Path:
    """A tiny Llama folder that a test may damage."""
    return Path(shutil.copytree(make_tiny_folder("llama"), tmp_path / "llama"))


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_then_loaded_folder_has_the_same_weights_and_hash(architecture, make_tiny_model, make_tiny_folder):
    model = make_tiny_model(architecture)
    loaded = models.load(make_tiny_folder(architecture))
    assert loaded.hash == models.hash_weights(model)
    assert loaded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    ids = torch.arange(40).reshape(2, 20)
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer.encode("ab") == loaded.tokenizer.encode("a") + loaded.tokenizer.encode("b")
    assert set(loaded.loaded_format.values()) == {"fp32"} and set(loaded.loaded_bits.values()) == {32.0}
    assert set(loaded.loaded_format) == {name for name, _ in loaded.model.named_parameters()}
    assert loaded.notes == ()


def test_hash_depends_on_values_names_and_shapes(make_tiny_model):
    model = make_tiny_model("llama")
    original = models.hash_weights(model)
    assert original != models.hash_weights(make_tiny_model("llama", seed=1))
    assert original == models.hash_weights(make_tiny_model("llama"))
    model.model.norm.weight[3] += 1e-3
    assert original != models.hash_weights(model)


def test_sharded_folder_equals_the_single_file(make_tiny_model, make_tiny_folder, tiny_tokenizer, tmp_path):
    make_tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    tiny_tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert models.load(str(tmp_path)).hash == models.load(make_tiny_folder("llama")).hash
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"index\.json names .* model-00002-of-.* is missing; download"):
        models.load(tmp_path)


def test_stored_dtypes_come_from_the_file_and_weights_become_fp32(llama_copy):
    tensors = load_file(llama_copy / "model.safetensors")
    tensors = {name: t if name.endswith("norm.weight") else t.bfloat16() for name, t in tensors.items()}
    save_file(tensors, llama_copy / "model.safetensors", metadata={"format": "pt"})
    loaded = models.load(llama_copy)
    assert loaded.loaded_format["model.layers.0.mlp.up_proj.weight"] == "bf16"
    assert loaded.loaded_bits["model.layers.0.mlp.up_proj.weight"] == 16
    assert loaded.loaded_format["model.norm.weight"] == "fp32"
    assert all(parameter.dtype == torch.float32 for parameter in loaded.model.parameters())
    stored = tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded.model.model.layers[0].mlp.up_proj.weight.numpy(), stored.astype(np.float32))


def test_merged_experts_report_the_format_of_the_checkpoint(make_tiny_model, tiny_tokenizer, tmp_path):
    """save_pretrained writes one tensor per expert; the loaded parameter is 3-D."""
    make_tiny_model("mixtral").to(torch.float16).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = models.load(tmp_path)
    assert loaded.loaded_format["model.layers.0.mlp.experts.gate_up_proj"] == "fp16"
    assert loaded.model.config._experts_implementation == "eager"


def test_loading_is_silent_and_changes_no_setting(llama_copy, capfd):
    from transformers.utils import logging as hf_logging

    tensors = load_file(llama_copy / "model.safetensors")
    save_file(tensors | {"extra": torch.ones(2)}, llama_copy / "model.safetensors", metadata={"format": "pt"})
    before = (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), list(warnings.filters))
    loaded = models.load(llama_copy)
    after = (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), list(warnings.filters))
    assert before == after
    assert logging.getLogger("transformers").handlers is not None
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert loaded.notes == ("1 tensors of the checkpoint are not used by LlamaForCausalLM: extra",)


def test_pickled_checkpoint_is_refused_unless_allowed(llama_copy):
    tensors = load_file(llama_copy / "model.safetensors")
    (llama_copy / "model.safetensors").unlink()
    torch.save({name: t.half() for name, t in tensors.items()}, llama_copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickled checkpoint.*--allow-pickle"):
        models.load(llama_copy)
    loaded = models.load(llama_copy, allow_pickle=True)
    assert set(loaded.loaded_format.values()) == {"fp16"}
    (llama_copy / "pytorch_model.bin").write_bytes(b"\x80\x02junk")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is damaged"):
        models.load(llama_copy, allow_pickle=True)


# --- bad folders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"no tensors here", None], ids=["empty", "text", "truncated"])
def test_truncated_or_foreign_safetensors_names_the_file(llama_copy, content):
    path = llama_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(
        ModelError, match=r"model\.safetensors is truncated or no safetensors file .*; download it again"
    ):
        models.load(llama_copy)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named_and_counted(llama_copy, value):
    path = llama_copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"].view(-1)[5:8] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' has 3 NaN or Inf among its 6144"):
        models.load(llama_copy)


def test_missing_tensor_is_no_random_tensor(llama_copy):
    path = llama_copy / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* 'model\.layers\.0\.self_attn\.k_proj\.weight'"):
        models.load(llama_copy)


def test_wrong_shape_is_refused(llama_copy):
    path = llama_copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        models.load(llama_copy)


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_config_errors_name_the_file(llama_copy):
    _edit_config(llama_copy, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match=r"config\.json: .* codes of the quantizer 'awq'.*pass the original model"):
        models.load(llama_copy)
    _edit_config(llama_copy, quantization_config=None, model_type="no_such_type")
    with pytest.raises(ModelError, match="no_such_type"):
        models.load(llama_copy)
    _edit_config(llama_copy, model_type="vit")
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        models.load(llama_copy)
    (llama_copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is no valid JSON"):
        models.load(llama_copy)
    (llama_copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json must hold a JSON object, not list"):
        models.load(llama_copy)
    (llama_copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.load(llama_copy)


def test_folder_without_weights_or_tokenizer(llama_copy):
    for path in llama_copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        models.load(llama_copy)
    (llama_copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor its index.*config\.json"):
        models.load(llama_copy)


def test_other_paths(llama_copy, tmp_path):
    with pytest.raises(ModelError, match=r"no file or folder at '/no/such/folder'; pass a model folder"):
        models.load("/no/such/folder")
    with pytest.raises(ModelError, match=r"no file or folder at 'weights\.gguf'"):
        models.load("weights.gguf")
    with pytest.raises(ModelError, match=r"no file or folder at 'a/b/c'"):
        models.load("a/b/c")
    with pytest.raises(ModelError, match=r"holds weights alone; pass the folder"):
        models.load(llama_copy / "model.safetensors")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is neither a \.gguf file nor a model folder"):
        models.load(text)


def test_unreachable_hub_id_is_one_sentence(monkeypatch):
    """huggingface_hub reads HF_HUB_OFFLINE when imported, so the switch itself is set: no test asks the network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"'modles/smol' is neither an existing file or folder nor a reachable hub id"):
        models.load("modles/smol")
    with pytest.raises(ModelError, match=r"did you mean 'demo-dithered'\?"):
        models.load("demo-ditherd")


# --- models in memory ------------------------------------------------------------------------------------------------


def test_from_memory_takes_present_dtypes_as_loaded(make_tiny_model, tiny_tokenizer):
    model = make_tiny_model("qwen2").to(torch.bfloat16)
    loaded = models.from_memory(model, tiny_tokenizer, name="mine")
    assert (loaded.name, set(loaded.loaded_format.values()), set(loaded.loaded_bits.values())) == (
        "mine",
        {"bf16"},
        {16},
    )
    assert all(parameter.dtype == torch.float32 for parameter in loaded.model.parameters())
