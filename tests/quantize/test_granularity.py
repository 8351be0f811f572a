"""Cutting matrices into groups that share a scale, and putting them together again, against NumPy slices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitwright.errors import SchemeError
from bitwright.quantize.granularity import (
    ROW,
    TENSOR,
    Granularity,
    block,
    from_groups,
    group,
    is_filling,
    spread,
    to_groups,
)

SHAPES = [(4, 6), (5, 7), (1, 1), (9, 4), (3, 16), (0, 5), (3, 0), (0, 0)]
GRANULARITIES = [TENSOR, ROW, group(1), group(4), group(100), block(1, 4), block(2, 3), block(4, 4), block(100, 100)]
CASES = pytest.mark.parametrize(
    ("shape", "granularity"),
    [(s, g) for s in SHAPES for g in GRANULARITIES],
    ids=lambda v: str(v).replace(", ", "x"),
)


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    return torch.arange(1.0, shape[0] * shape[1] + 1).reshape(shape)


def slices(shape: tuple[int, int], granularity: Granularity) -> dict[tuple[int, int], tuple[slice, slice]]:
    """(row, column of the scale) → the rectangle of elements under it, clipped by NumPy's own slicing rules."""
    rows, columns = shape
    height, width = {
        "tensor": (rows, columns),
        "row": (1, columns),
        "group": (1, granularity.group_size),
        "block": (granularity.block_rows, granularity.group_size),
    }[granularity.scope]
    return {
        (i, j): (slice(top, top + height), slice(left, left + width))
        for i, top in enumerate(range(0, rows, max(height, 1)))
        for j, left in enumerate(range(0, columns, max(width, 1)))
    }


@CASES
def test_every_group_is_its_rectangle_of_the_matrix(shape: tuple[int, int], granularity: Granularity) -> None:
    x = matrix(shape)
    grouped = to_groups(x, granularity)
    filling = is_filling(x, granularity)
    expected = slices(shape, granularity)
    for (i, j), rectangle in expected.items():
        own = grouped[i, j] if filling is None else grouped[i, j][~filling[i, j]]
        assert np.array_equal(own.numpy(), x.numpy()[rectangle].ravel())
        assert set(grouped[i, j].tolist()) == set(own.tolist()), "what fills a group up is one of its own numbers"
    if shape[0] and shape[1]:
        assert grouped.shape[:2] == granularity.scale_shape(*shape)
        assert granularity.num_scales(*shape) == len(expected)


@CASES
def test_from_groups_undoes_to_groups(shape: tuple[int, int], granularity: Granularity) -> None:
    x = matrix(shape)
    back = from_groups(to_groups(x, granularity), *shape, granularity)
    assert torch.equal(back, x) and back.is_contiguous()


@CASES
def test_spreading_repeats_the_number_of_each_group(shape: tuple[int, int], granularity: Granularity) -> None:
    scale_rows, scale_columns = granularity.scale_shape(*shape)
    numbers = torch.arange(1.0, scale_rows * scale_columns + 1).reshape(scale_rows, scale_columns)
    spread_out = spread(numbers, *shape, granularity)
    expected = np.zeros(shape)
    for place, rectangle in slices(shape, granularity).items():
        expected[rectangle] = numbers[place]
    assert np.array_equal(np.broadcast_to(spread_out.numpy(), shape), expected)


def test_groups_that_lie_in_memory_already_are_views() -> None:
    x = matrix((6, 8))
    for granularity in (TENSOR, ROW, group(4)):
        assert to_groups(x, granularity).data_ptr() == x.data_ptr()


def test_names() -> None:
    assert [str(g) for g in (TENSOR, ROW, group(32), block(128, 64))] == [
        "tensor",
        "row",
        "group(32)",
        "block(128, 64)",
    ]


def test_scales_of_a_deepseek_weight() -> None:
    # DeepSeek-V3, kv_a_proj_with_mqa [576, 7168]: weight_scale_inv of shape [5, 56]
    assert block(128, 128).scale_shape(576, 7168) == (5, 56)
    assert block(128, 128).has_ragged_group(7168) is False
    assert block(128, 128).has_ragged_group(7169) is True


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scope": "group"}, "group_size is 0 for scope 'group'"),
        ({"scope": "row", "group_size": 4}, "group_size is 4 for scope 'row'"),
        ({"scope": "block", "group_size": 4}, "block_rows is 0 for scope 'block'"),
        ({"scope": "group", "group_size": 4, "block_rows": 2}, "block_rows is 2 for scope 'group'"),
        ({"scope": "group", "group_size": 1.5}, "group_size is 1.5"),
        ({"scope": "group", "group_size": -1}, "group_size is -1"),
        ({"scope": "column"}, "unknown scope 'column'"),
    ],
)
def test_sizes_that_contradict_the_scope_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        Granularity(**fields)  # type: ignore[arg-type]
