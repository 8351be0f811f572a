"""Rotations cancel in a product, spread outliers, and are the same bits everywhere."""

from __future__ import annotations

import pytest
import torch

from bitwright.training.products.rotation import rotate


def gaussian(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [2, 16, 64])
@pytest.mark.parametrize("columns", [1, 16, 37, 128])
def test_it_cancels_in_a_product(width: int, columns: int) -> None:
    a, b = gaussian(5, columns, 0), gaussian(7, columns, 1)
    rotated_a, rotated_b = rotate(a, width), rotate(b.bfloat16(), width)
    assert rotated_a.shape[1] % width == 0 and rotated_a.shape[1] - columns < width
    product = rotated_a.double() @ rotated_b.double().t()
    assert torch.allclose(product, a.double() @ b.bfloat16().double().t(), atol=1e-5)


def test_it_is_a_hadamard_matrix_with_signs() -> None:
    """Rows of the rotated unit matrix: entries ±1/√w, orthogonal, against SciPy's matrix up to the signs."""
    rotated = rotate(torch.eye(16), 16)
    assert torch.equal(rotated.abs(), torch.full((16, 16), 0.25))
    assert torch.equal(rotated @ rotated.t(), torch.eye(16))
    sylvester = torch.ones(1, 1)
    for _ in range(4):
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    signs = rotated[:, :1] * 4
    assert torch.equal(rotated * 4 * signs, sylvester)
    assert 0 < int((signs < 0).sum()) < 16


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = 1600.0
    rotated = rotate(x, 16)
    assert torch.equal(rotated[0, :16].abs(), torch.full((16,), 400.0))
    assert torch.equal(rotated[0, 16:], torch.zeros(16))


def test_strides_do_not_matter() -> None:
    x = gaussian(48, 20, 3)
    assert torch.equal(rotate(x.t(), 16), rotate(x.t().contiguous(), 16))
    assert rotate(x[:0].t(), 16).shape == (20, 0)
