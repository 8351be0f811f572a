"""Clip search: never worse than rounding to nearest by its own measure, and better where outliers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright.errors import SchemeError
from bitwright.quantize import ROUNDINGS, SCHEMES, QTensor, TensorScheme
from bitwright.quantize.moment import BLOCK, InputMoment
from bitwright.quantize.seen import Seen

CLIPPED = {
    name: scheme.weights
    for name, scheme in SCHEMES.items()
    if scheme.weights is not None and ROUNDINGS["clip"].applies_to(scheme.weights)
}
ALL = pytest.mark.parametrize("scheme", CLIPPED.values(), ids=CLIPPED.keys())


def correlated_inputs(columns: int, seed: int = 0) -> Tensor:
    """Tokens [T, K] whose columns differ in size and depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.rand(columns, generator=generator).square() / columns**0.5


def heavy_tailed(rows: int, columns: int, seed: int = 1) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_t(3, (rows, columns)) * 0.02).astype(np.float32))


def damage_per_group(q: QTensor, w_NK: Tensor, x_TK: Tensor) -> np.ndarray:
    """E[(e_group · x_group)²] of each row and group, by running the tokens through the error: float64 [N, G]."""
    assert q.scheme.scaling is not None
    columns = w_NK.shape[1]
    width = q.scheme.scaling.granularity.group_columns(columns)
    error, x = (q.dequantize() - w_NK).double().numpy(), x_TK.double().numpy()
    starts = range(0, columns, width)
    shifts = [x[:, s : s + width] @ error[:, s : s + width].T for s in starts]  # [T, N] of each group
    return np.stack([np.square(shift).mean(axis=0) for shift in shifts], axis=1)


@ALL
@pytest.mark.parametrize("columns", [256, 200])
def test_no_group_is_worse_than_rounded_to_nearest(scheme: TensorScheme, columns: int) -> None:
    w, x = heavy_tailed(24, columns), correlated_inputs(columns)
    nearest = damage_per_group(ROUNDINGS["rtn"].quantize(w, scheme, None), w, x)
    clipped = damage_per_group(ROUNDINGS["clip"].quantize(w, scheme, Seen(x_TK=x)), w, x)
    assert (clipped <= nearest * (1 + 1e-3) + 1e-12).all()  # the search sums in fp32


@ALL
def test_heavy_tails_gain(scheme: TensorScheme) -> None:
    w, x = heavy_tailed(64, 256), correlated_inputs(256)
    nearest = damage_per_group(ROUNDINGS["rtn"].quantize(w, scheme, None), w, x).sum()
    clipped = damage_per_group(ROUNDINGS["clip"].quantize(w, scheme, Seen(x_TK=x)), w, x).sum()
    assert clipped < 0.85 * nearest


@ALL
def test_columns_that_no_input_reaches_are_given_up(scheme: TensorScheme) -> None:
    """An outlier on a silent column costs nothing: the range follows the others."""
    w = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    w[:, 5] = 0.12
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(1))
    x[:, 5] = 0
    nearest = damage_per_group(ROUNDINGS["rtn"].quantize(w, scheme, None), w, x)[:, 0]
    clipped = damage_per_group(ROUNDINGS["clip"].quantize(w, scheme, Seen(x_TK=x)), w, x)[:, 0]
    assert scheme.scaling is not None
    # a zero point or minimum gives up as much of the range on the side without the outlier
    assert clipped.sum() < (0.6 if scheme.scaling.symmetry == "symmetric" else 0.9) * nearest.sum()


@ALL
def test_data_are_needed(scheme: TensorScheme) -> None:
    assert ROUNDINGS["clip"].needs_data
    with pytest.raises(SchemeError, match="calibrate first, or use rounding rtn"):
        ROUNDINGS["clip"].quantize(torch.ones(2, 64), scheme, None)


def test_only_coarse_integers_are_searched() -> None:
    assert set(CLIPPED) == {"int3_g64", *(f"int4_g{size}{k}" for size in (128, 64, 32) for k in ("", "_zp", "_min"))}


@ALL
def test_zeros_and_silent_inputs_change_nothing(scheme: TensorScheme) -> None:
    w = heavy_tailed(3, 128)
    nearest = ROUNDINGS["rtn"].quantize(w, scheme, None).dequantize()
    silent = ROUNDINGS["clip"].quantize(w, scheme, Seen(x_TK=torch.zeros(10, 128)))
    assert torch.equal(silent.dequantize(), nearest)
    zeros = ROUNDINGS["clip"].quantize(torch.zeros(3, 128), scheme, Seen(x_TK=correlated_inputs(128)))
    assert torch.equal(zeros.dequantize(), torch.zeros(3, 128))


@ALL
def test_a_nan_spoils_its_own_group_only(scheme: TensorScheme) -> None:
    w = heavy_tailed(3, 256)
    w[1, 200] = float("nan")
    values = ROUNDINGS["clip"].quantize(w, scheme, Seen(x_TK=correlated_inputs(256))).dequantize()
    assert values[1, 200].isnan()
    assert torch.isfinite(values[[0, 2]]).all() and torch.isfinite(values[1, :128]).all()


def test_chunks_of_rows_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = CLIPPED["int4_g64"]
    w, moment = heavy_tailed(33, 192), Seen(x_TK=correlated_inputs(192))
    at_once = ROUNDINGS["clip"].quantize(w, scheme, moment).dequantize()
    monkeypatch.setattr("bitwright.quantize.rounding.clip._CHUNK_WEIGHTS", 192 * 5)
    assert torch.equal(ROUNDINGS["clip"].quantize(w, scheme, moment).dequantize(), at_once)


# --- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 128, 200, 576])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_damage_is_the_mean_square_output_error_of_each_group(width: int, columns: int) -> None:
    x = correlated_inputs(columns)
    num_groups = -(-columns // width)
    error = torch.randn(5, num_groups, width, generator=torch.Generator().manual_seed(3))
    padded = np.zeros((x.shape[0], num_groups * width))
    padded[:, :columns] = x.numpy()
    grouped = padded.reshape(-1, num_groups, width)
    expected = np.square(np.einsum("tgi,ngi->tng", grouped, error.double().numpy())).mean(axis=0)
    found = InputMoment.of(x).damage(error.transpose(0, 1).contiguous())[..., 0].T.numpy()
    assert found == pytest.approx(expected, rel=2e-4, abs=1e-6)


def test_damage_of_whole_rows_is_weighted_by_the_diagonal() -> None:
    x = correlated_inputs(3 * BLOCK - 10)
    error = torch.randn(4, 1, 3 * BLOCK - 10, generator=torch.Generator().manual_seed(3))
    expected = (error[:, 0].double().square() * x.double().square().mean(0)).sum(-1)
    assert InputMoment.of(x).damage(error.transpose(0, 1))[0, :, 0].numpy() == pytest.approx(expected.numpy(), rel=1e-4)


def test_token_weights_count_relative_to_their_mean() -> None:
    x = correlated_inputs(64)
    weights = torch.rand(400, generator=torch.Generator().manual_seed(4))
    weighted = InputMoment.of(x, weights).blocks
    expected = (x.double() * (weights / weights.mean()).double().unsqueeze(1)).T @ x.double() / 400
    assert weighted[0, :64, :64].numpy() == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-5)
    assert torch.equal(InputMoment.of(x, torch.ones(400)).blocks, InputMoment.of(x).blocks)
