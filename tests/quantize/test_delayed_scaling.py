"""Delayed and current scaling against a transcription, number by number, of what Transformer Engine and MS-AMP do."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from bitwright.errors import SchemeError
from bitwright.quantize.delayed_scaling import DelayedScaling, current_inv_scale, power_of_two_inv_scale

F32_MAX = np.finfo(np.float32).max
#: Largest values by OFP8 1.0, table 1.
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


class TransformerEngine:
    """One tensor: a list of fp32 amaxes, slot 0 the current one; the scale multiplies x. All np.float32."""

    def __init__(self, largest: float, length: int, choice: str, margin: int) -> None:
        self.largest, self.choice, self.margin = np.float32(largest), choice, margin
        self.history = [np.float32(0)] * length
        self.scale = np.float32(1)

    def step(self, amax: float) -> None:
        self.history[0] = np.float32(amax)
        if self.choice == "most_recent":
            found = self.history[0]
        else:
            found = np.float32(math.nan) if any(math.isnan(a) for a in self.history) else max(self.history)
        if found > 0 and math.isfinite(found):
            with np.errstate(over="ignore"):
                scale = np.float32(self.largest / found) / np.float32(2.0**self.margin)
            self.scale = F32_MAX if np.isinf(scale) else scale
        self.history = [*self.history[1:], self.history[0]]
        self.history[0] = np.float32(0)


def amaxes(num_steps: int, seed: int = 0) -> list[float]:
    """Amaxes over 60 binades, with zeros, Inf, NaN and subnormals among them."""
    rng = np.random.default_rng(seed)
    values = np.exp2(rng.uniform(-30, 30, num_steps)).astype(np.float32)
    kinds = rng.random(num_steps)
    values[kinds < 0.1] = 0
    values[(kinds >= 0.1) & (kinds < 0.15)] = np.inf
    values[(kinds >= 0.15) & (kinds < 0.2)] = np.nan
    values[(kinds >= 0.2) & (kinds < 0.25)] = 1e-44
    return [float(v) for v in values]


@pytest.mark.parametrize("format_name", LARGEST)
@pytest.mark.parametrize("choice", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_every_step_is_that_of_transformer_engine(format_name: str, choice: str, margin: int, length: int) -> None:
    state = DelayedScaling(format_name, history_length=length, amax_choice=choice, margin=margin)  # type: ignore[arg-type]
    expected = TransformerEngine(LARGEST[format_name], length, choice, margin)
    for amax in amaxes(200):
        state.record(torch.tensor(amax), 0)
        state.update()
        expected.step(amax)
        assert state.inv_scale.numpy()[0] == expected.scale
        assert np.array_equal(state.history.numpy()[:, 0], np.array(expected.history), equal_nan=True)
        assert state.scale.numpy()[0] == np.float32(1) / expected.scale


def test_the_start_is_an_empty_history_of_1024_steps_and_the_scale_one() -> None:
    state = DelayedScaling("fp8_e4m3", 5)
    assert state.history.shape == (1024, 5) and not state.history.any()
    assert state.inv_scale.tolist() == state.scale.tolist() == [1.0] * 5


def test_an_amax_counts_for_exactly_the_length_of_the_history() -> None:
    for length in (1, 3, 1024):
        state = DelayedScaling("fp8_e4m3", history_length=length)
        state.record(torch.tensor(56.0))
        state.update()
        for _ in range(length - 1):
            state.record(torch.tensor(7.0))
            state.update()
            assert state.inv_scale.item() == 8.0  # 448 / 56
        state.record(torch.tensor(7.0))
        state.update()
        assert state.inv_scale.item() == 64.0  # 448 / 7


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_an_amax_that_says_nothing_keeps_the_old_scale(amax: float) -> None:
    state = DelayedScaling("fp8_e4m3", history_length=2, amax_choice="most_recent")
    state.record(torch.tensor(7.0))
    state.update()
    state.record(torch.tensor(amax))
    state.update()
    assert state.inv_scale.item() == 64.0


def test_a_subnormal_amax_gives_the_largest_fp32_number_and_a_scale_above_zero() -> None:
    state = DelayedScaling("fp8_e4m3")
    state.record(torch.tensor(1e-40))
    state.update()
    assert state.inv_scale.item() == F32_MAX
    assert 0 < state.scale.item() == pytest.approx(1 / F32_MAX, rel=1e-6)


def test_the_scale_is_no_power_of_two_and_the_margin_is() -> None:
    state = DelayedScaling("fp8_e4m3", margin=2)
    state.record(torch.tensor(3.0))
    state.update()
    assert state.inv_scale.item() == np.float32(448) / np.float32(3) / 4


def test_scale_multiplies_codes_back_to_values_and_values_out_of_range_are_clipped() -> None:
    state = DelayedScaling("fp8_e4m3")
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    first = state.fake_quantize(x)  # under scale 1
    assert np.array_equal(first.numpy(), x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    state.update()
    inv_scale = np.float32(448) / np.float32(x.abs().max().item())
    grown = torch.cat([x * 3, torch.tensor([[math.inf, math.nan] + [0.0] * 30])])
    codes = np.clip(grown.numpy() * inv_scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (codes == 448).sum() > 1
    found = state.fake_quantize(grown).numpy()
    assert np.array_equal(found, codes * (np.float32(1) / inv_scale), equal_nan=True)
    assert np.isnan(found).sum() == 1


def test_several_tensors_are_updated_at_once_and_one_may_occur_several_times_in_a_step() -> None:
    state = DelayedScaling("fp8_e5m2", 3, history_length=4)
    state.record(torch.tensor(2.0), 0)
    state.record(torch.tensor(8.0), 0)
    state.record(torch.tensor(4.0), 0)
    state.record(torch.tensor([16.0]), slice(2, 3))
    state.update()
    assert state.inv_scale.tolist() == [57344 / 8, 1.0, 57344 / 16]
    state.record(torch.tensor([1.0, 32.0, 64.0]))
    state.update()
    assert state.inv_scale.tolist() == [57344 / 8, 57344 / 32, 57344 / 64]
    assert state.history[:, 2].tolist() == [0.0, 0.0, 16.0, 64.0]


def test_amaxes_are_exchanged_once_an_update() -> None:
    calls = []

    def maximum_over_ranks(amax: torch.Tensor) -> torch.Tensor:
        calls.append(amax.clone())
        return torch.maximum(amax, torch.tensor([1.0, 28.0]))

    state = DelayedScaling("fp8_e4m3", 2, history_length=2, reduce_amax=maximum_over_ranks)
    state.record(torch.tensor([7.0, 7.0]))
    state.update()
    assert [call.tolist() for call in calls] == [[7.0, 7.0]]
    assert state.inv_scale.tolist() == [64.0, 16.0]
    assert state.history[-1].tolist() == [7.0, 28.0]


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    through, saved = (DelayedScaling("fp8_e4m3", 2, history_length=3) for _ in range(2))
    values = amaxes(40, seed=3)
    for step, amax in enumerate(values):
        if step == 21:
            state = saved.state_dict()
            saved.record(torch.tensor([9e9, 9e9]))
            saved.update()
            saved = DelayedScaling("fp8_e4m3", 2, history_length=3)
            saved.load_state_dict(state)
        for one in (through, saved):
            one.record(torch.tensor([amax, values[-step]]))
            one.update()
    assert torch.equal(through.inv_scale, saved.inv_scale)
    assert np.array_equal(through.history.numpy(), saved.history.numpy(), equal_nan=True)


def test_faults_are_named() -> None:
    with pytest.raises(SchemeError, match="0 tensors over 1024 steps"):
        DelayedScaling("fp8_e4m3", 0)
    with pytest.raises(SchemeError, match="amax_choice is 'mean'"):
        DelayedScaling("fp8_e4m3", amax_choice="mean")  # type: ignore[arg-type]
    state = DelayedScaling("fp8_e4m3", 2, history_length=3)
    with pytest.raises(SchemeError, match=r"history is \[1024, 2\], not \[3, 2\]"):
        state.load_state_dict(DelayedScaling("fp8_e4m3", 2).state_dict())
    with pytest.raises(SchemeError, match="inv_scale is nothing"):
        state.load_state_dict({"history": state.history})


def test_gradients_do_not_reach_the_history() -> None:
    state = DelayedScaling("fp8_e4m3")
    x = torch.ones(4, requires_grad=True)
    state.record(x.abs().amax())
    state.update()
    assert not state.history.requires_grad and not state.inv_scale.requires_grad


# --- from this tensor's own amax --------------------------------------------------------------------------------------


def te_current(amax: float, largest: float, epsilon: float, power_of_two: bool) -> np.float32:
    """compute_scale_from_amax of recipe_common.cuh."""
    amax32 = np.float32(epsilon) if amax < epsilon else np.float32(amax)
    if math.isinf(amax32) or math.isnan(amax32) or amax32 == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / amax32
    if np.isinf(scale):
        scale = F32_MAX
    if power_of_two:
        scale = (np.float32(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.float32(scale)


EDGES = [
    0.0,
    1e-45,
    1e-40,
    1e-36,
    1e-4,
    0.9999999,
    1.0,
    6.999,
    7.0,
    448.0,
    448.00003,
    57344.0,
    3e38,
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("format_name", LARGEST)
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_current_scaling_is_that_of_transformer_engine(format_name: str, epsilon: float, power_of_two: bool) -> None:
    values = np.array(EDGES + amaxes(300, seed=1), dtype=np.float32)
    found = current_inv_scale(torch.from_numpy(values), format_name, epsilon=epsilon, is_power_of_two=power_of_two)
    expected = [te_current(float(v), LARGEST[format_name], epsilon, power_of_two) for v in values]
    assert np.array_equal(found.numpy(), np.array(expected))


@pytest.mark.parametrize("margin", [0, 1, 5])
def test_ms_amp_scales_are_powers_of_two_below_the_quotient(margin: int) -> None:
    values = np.array(EDGES + amaxes(300, seed=2), dtype=np.float32)
    found = power_of_two_inv_scale(torch.from_numpy(values), torch.tensor(0.625), "fp8_e4m3", margin=margin).numpy()
    for amax, inv_scale in zip(values, found, strict=True):
        if not (amax > 0 and math.isfinite(amax)):
            assert inv_scale == 0.625
            continue
        with np.errstate(over="ignore"):
            quotient = min(np.float32(448) / amax, F32_MAX)
        exponent = math.frexp(quotient)[1] - 1 - margin
        assert inv_scale == 2.0 ** min(max(exponent, -126), 127)
