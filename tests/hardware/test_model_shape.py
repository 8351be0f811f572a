"""Models known by name: the parameters counted from their sizes are those that their makers give."""

from __future__ import annotations

import pytest

from bitwright.errors import HardwareError, UnknownName
from bitwright.hardware import KNOWN_MODELS
from bitwright.hardware.model_shape_file import parse_model

#: Published as a rounded figure in a paper's table, and not by a checkpoint.
ROUNDED = {"gpt3-175b"}


@pytest.mark.parametrize("name", KNOWN_MODELS.names)
def test_the_sizes_give_the_published_parameters(name: str) -> None:
    known = KNOWN_MODELS.get(name)
    tolerance = 0.005 if name in ROUNDED else 0
    assert known.shape.num_parameters == pytest.approx(known.published_parameters, rel=tolerance, abs=0)


def test_matrices_of_a_layer_are_its_weights() -> None:
    for known in KNOWN_MODELS.records.values():
        shape = known.shape
        assert shape.num_layers * sum(rows * columns for rows, columns in shape.layer_matrices) == shape.linear_weights


def test_names_and_aliases() -> None:
    assert KNOWN_MODELS.get("GPT-3").name == "gpt3-175b"
    with pytest.raises(UnknownName, match="did you mean 'llama-65b'"):
        KNOWN_MODELS.get("llama-66b")


def test_a_wrong_file_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"'x\.toml': field 'num_layers'"):
        parse_model(b'name = "x"\n', "x.toml")
    with pytest.raises(HardwareError, match="no TOML"):
        parse_model(b"name =", "x.toml")
