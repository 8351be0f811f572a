"""States → JSON and tensors → states: everything that a state_dict holds, exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from bitwright.errors import TrainingError
from bitwright.training.checkpoints.state_tree import join_state, split_state
from bitwright.training.policy import POLICIES
from bitwright.training.record_facts import differences, plain_facts


def there_and_back(state: Any, folder: Path) -> Any:
    tree, tensors = split_state(state)
    safetensors.torch.save_file(tensors, folder / "t.safetensors")
    return join_state(
        json.loads(json.dumps(tree, allow_nan=False)), safetensors.torch.load_file(folder / "t.safetensors")
    )


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flag": True,
        "large": 2**63 + 1,
        "third": 1 / 3,
        "tiny": 5e-324,
        "text": "β₂",
        "list": [1, [2, "x"], {"$": "tensor"}],
        "tuple": (0.9, (0.95, None)),
        "by number": {0: {"step": 1.0}, 1: {}},
        "infinite": [math.inf, -math.inf],
        "empty": {},
    }
    assert there_and_back(state, tmp_path) == state
    assert math.isnan(there_and_back([math.nan], tmp_path)[0])
    assert type(there_and_back({"t": (1,)}, tmp_path)["t"]) is tuple


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_tensors_come_back_in_their_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    for value in (torch.tensor(1), torch.zeros(0, 3), torch.arange(6).reshape(2, 3).T):
        given = value.to(dtype)
        found = there_and_back({"a": {0: given}}, tmp_path)["a"][0]
        assert (found.dtype, found.shape) == (dtype, given.shape)
        assert torch.equal(found.float(), given.float())


def test_special_numbers_keep_their_bits(tmp_path: Path) -> None:
    given = torch.tensor([math.nan, -0.0, math.inf, 1e-45])
    found = there_and_back([given], tmp_path)[0]
    assert torch.equal(found.view(torch.int32), given.view(torch.int32))


def test_shared_tensors_are_stored_once_and_views_by_themselves(tmp_path: Path) -> None:
    base = torch.arange(8.0)
    tree, tensors = split_state(
        {"tied": base, "embedding": base, "half": base[4:], "a.b": base + 1, "a": {"b": base + 2}}
    )
    assert sorted(tensors) == ["a.b", "a.b#2", "half", "tied"]
    found = join_state(tree, tensors)
    assert torch.equal(found["embedding"], base)
    assert torch.equal(found["half"], base[4:])
    assert torch.equal(found["a"]["b"], base + 2)
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(TrainingError, match=r"'a\.1' of a state is Generator, but a checkpoint holds tensors"):
        split_state({"a": [1, torch.Generator()]})


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_plain_facts(name: str) -> None:
    facts = plain_facts(POLICIES[name])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["name"] == name
    assert differences(facts, facts) == []


def test_differences_name_the_field() -> None:
    there = {"a": 1, "b": {"c": [1, 2], "why": "x"}, "gone": None}
    here = {"a": 1, "b": {"c": [1, 3], "why": "y"}, "new": True}
    assert differences(there, here, ignored=("why",)) == [
        ("b.c", [1, 2], [1, 3]),
        ("gone", None, "absent"),
        ("new", "absent", True),
    ]
