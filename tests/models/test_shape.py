"""Shapes from a config: what contradicts itself is an error of ours that says how; and which positions there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwright.errors import ModelError
from bitwright.models.shape import shape_of


def test_a_config_that_contradicts_itself(tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Mamba2's heads are to have hidden_size · expand columns; its defaults are of a larger model.
    with pytest.raises(
        ModelError, match=r"cannot be built from its config \(.*hidden_size.*\); correct its config.json"
    ):
        shape_of(tmp_path)


@pytest.mark.parametrize(("kind", "is_learned"), [("gpt2", True), ("opt", True), ("llama", False)])
def test_positions_are_learned_or_computed(tmp_path: Path, kind: str, is_learned: bool) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    sizes |= {"n_embd": 64, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {"word_embed_proj_dim": 64}
    limit = {"max_position_embeddings": 96} | ({"n_positions": 96} if kind == "gpt2" else {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **limit}))
    shape = shape_of(tmp_path)
    assert (shape.max_positions, shape.has_learned_positions) == (96, is_learned)
