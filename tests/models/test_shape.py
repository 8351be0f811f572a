"""Shapes from a config: what contradicts itself is an error of ours that says how."""

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
