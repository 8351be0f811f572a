"""What an operand lost, against every number of its format and ml_dtypes' casts, which do not saturate."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright.formats import FORMATS
from bitwright.training.products.lost_numbers import LostNumbers, count_lost

DTYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("name", DTYPES)
def test_counts_are_those_of_casts_that_do_not_saturate(name: str) -> None:
    largest = float(FORMATS[name].max)
    numbers = torch.cat([
        torch.linspace(0.9, 1.2, 1001) * largest,
        -torch.logspace(-12, 8, 4001),
        torch.tensor([0.0, -0.0, largest, torch.nan, torch.inf, -torch.inf]),
    ])[None]  # fmt: skip
    scale = torch.tensor(0.5)
    cast = (numbers / scale).numpy().astype(DTYPES[name]).astype(np.float32)
    codes = torch.from_numpy(np.where(np.isfinite(cast), cast, largest))
    lost = count_lost(numbers, codes, scale, name)
    finite = np.isfinite(numbers.numpy())
    assert lost.num == numbers.numel() and lost.non_finite == 3
    assert lost.zeros == 2
    assert lost.overflowed == int((~np.isfinite(cast) & finite).sum()) > 100
    assert lost.flushed == int(((cast == 0) & (numbers.numpy() != 0)).sum()) > 100
    assert lost.overflowed_share == lost.overflowed / lost.num and lost.flushed_share == lost.flushed / lost.num


def test_fp4_and_integers() -> None:
    """6 is the largest of E2M1, and the tie at 7 rounds away from it; of int8, 127, and so does 127.5."""
    x = torch.tensor([[6.9, 7.0, 7.1, 0.2, 127.4, 127.5]])
    assert count_lost(x, torch.tensor([[6.0, 6.0, 6.0, 0.0, 6.0, 6.0]]), torch.tensor(1.0), "fp4_e2m1").overflowed == 4
    assert count_lost(x, x, torch.tensor(1.0), "int8").overflowed == 1


def test_counts_add_up() -> None:
    one = LostNumbers(num=4, zeros=1, flushed=2, overflowed=1, non_finite=0)
    assert one + one == LostNumbers(num=8, zeros=2, flushed=4, overflowed=2, non_finite=0)
    assert LostNumbers().flushed_share == 0.0
