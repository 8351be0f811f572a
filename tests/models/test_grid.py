"""Weights on a grid are found with the right bits and group; weights on none are never."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from bitwright.models import detect_grid, find_sites


def model_of(*weights: np.ndarray) -> nn.Module:
    layers = []
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = torch.from_numpy(weight.astype(np.float32))
        layers.append(layer)
    return nn.Sequential(*layers)


def grid_of(*weights: np.ndarray):
    model = model_of(*weights)
    return detect_grid(model, find_sites(model))


def on_grid(shape, *, bits, group, minimum, rng):
    """code·scale (+ minimum) in fp32, each group using its lowest and highest code."""
    codes = rng.integers(0, 2**bits, size=(shape[0], shape[1] // group, group))
    codes[..., 0], codes[..., 1] = 0, 2**bits - 1
    scale = rng.uniform(0.01, 0.02, size=(*codes.shape[:2], 1)).astype(np.float16).astype(np.float32)
    if minimum:
        low = rng.uniform(-0.2, -0.1, size=scale.shape).astype(np.float16).astype(np.float32)
        values = codes.astype(np.float32) * scale + low
    else:
        values = (codes - 2 ** (bits - 1)).astype(np.float32) * scale
    return values.reshape(shape)


@pytest.mark.parametrize("minimum", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 512])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_grids_are_found(bits, group, minimum):
    rng = np.random.default_rng(0)
    grid = grid_of(*(on_grid((40, 512), bits=bits, group=group, minimum=minimum, rng=rng) for _ in range(3)))
    assert grid is not None
    assert (grid.bits, grid.group, grid.has_minimum) == (bits, None if group == 512 else group, minimum)
    assert grid.full_span and grid.share_ratio == 1


def test_schemes_are_named_only_where_they_reproduce_the_weights():
    rng = np.random.default_rng(1)
    full = on_grid((40, 256), bits=4, group=32, minimum=True, rng=rng)
    assert grid_of(full).scheme == "int4_g32_min"
    assert grid_of(on_grid((40, 256), bits=4, group=64, minimum=False, rng=rng)).scheme == "int4_g64_zp"
    assert grid_of(on_grid((40, 256), bits=3, group=64, minimum=False, rng=rng)).scheme is None
    narrow = rng.integers(2, 12, size=(40, 8, 32)) * np.float32(0.01)  # codes 2 … 11: the step is not (max − min) / 15
    narrow = grid_of(narrow.reshape(40, 256).astype(np.float32))
    assert narrow.bits == 4 and narrow.scheme is None


def test_some_sites_on_a_grid():
    rng = np.random.default_rng(2)
    on = [on_grid((40, 256), bits=4, group=32, minimum=True, rng=rng) for _ in range(3)]
    off = [rng.normal(size=(40, 256)) for _ in range(4)]
    grid = grid_of(*on, off[0])
    assert grid.share_ratio == 0.75 and grid.scheme is None
    assert grid.describe() == (
        "weights of 75% of the decoder's sites already lie on a 4-bit grid of 32 (code·scale + minimum)"
    )
    assert grid_of(*on, *off) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_floating_weights_lie_on_no_grid(dtype, seed):
    # not too small: the subnormal numbers of fp8_e4m3, below 2^-6, are a grid
    weight = np.random.default_rng(seed).normal(scale=8.0, size=(64, 576)).astype(dtype)
    assert grid_of(weight.astype(np.float32)) is None


def test_a_grid_blurred_by_bf16_is_not_reported():
    weight = on_grid((40, 256), bits=4, group=32, minimum=True, rng=np.random.default_rng(3))
    assert grid_of(weight.astype(ml_dtypes.bfloat16).astype(np.float32)) is None


def test_constant_and_tiny_weights_tell_nothing():
    assert grid_of(np.zeros((8, 64))) is None
    assert grid_of(np.full((8, 64), 0.5)) is None
    assert grid_of(1000 + np.random.default_rng(4).normal(scale=1e-4, size=(16, 64))) is None
    assert detect_grid(nn.Sequential(), ()) is None


@pytest.mark.parametrize("architecture", ("llama", "gpt2", "mixtral"))
def test_random_models_lie_on_no_grid(architecture, make_tiny_model):
    model = make_tiny_model(architecture)
    assert detect_grid(model, find_sites(model)) is None


@pytest.mark.demo
def test_the_built_in_model_lies_on_its_grid(demo_model):
    """Q4_1 is 32 weights, 4-bit codes, an fp16 scale and an fp16 minimum (ggml's block_q4_1)."""
    grid = detect_grid(demo_model.model, find_sites(demo_model.model))
    assert (grid.bits, grid.group, grid.has_minimum, grid.full_span, grid.share_ratio) == (4, 32, True, True, 1.0)
    assert grid.describe() in demo_model.notes


@pytest.mark.demo
def test_the_dithered_model_lies_on_none(dithered_demo_model):
    assert detect_grid(dithered_demo_model.model, find_sites(dithered_demo_model.model)) is None
