"""Which backend runs: preference by device, reasons in words, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch

from bitwright.errors import SchemeError, UnknownName
from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize, select
from bitwright.quantize.select import select_delayed, select_packing, select_rounding, select_scaled


def scheme(name: str) -> TensorScheme:
    found = SCHEMES[name].weights
    assert found is not None
    return found


def test_kernels_run_where_there_are_some() -> None:
    assert select_rounding("fp8_e4m3", "cpu", torch.float32).backend == "cpu"
    assert select_scaled(scheme("mxfp4"), "cpu", torch.bfloat16).backend == "cpu"
    assert select_packing(scheme("nvfp4"), "cpu", torch.float32).backend == "cpu"
    assert select_delayed("fp8_e4m3", "cpu", torch.bfloat16).backend == "cpu"
    assert select_scaled(scheme("mxfp4"), "cuda", torch.bfloat16).backend == "triton"


def test_what_was_passed_over_is_said() -> None:
    offsets = select_scaled(scheme("int4_g128_zp"), "cpu", torch.float32)
    assert offsets.backend == "torch" and "not cpu: CPU kernels know symmetric groups only" in offsets.reason
    drawn = select_scaled(scheme("mxfp4"), "cpu", torch.float32, "stochastic")
    assert drawn.backend == "torch" and "stochastic" in drawn.reason
    assert select_rounding("e8m0", "cpu", torch.float32).backend == "torch"


def test_other_devices_run_torch_operations() -> None:
    assert select_scaled(scheme("mxfp4"), "mps", torch.float32).backend == "torch"
    assert select_rounding("fp8_e4m3", "xpu", torch.float32).backend == "torch"


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None if name in ("triton", "numba") else object())
    select_scaled.cache_clear()
    for device_type, package in (("cuda", "triton"), ("cpu", "numba")):
        found = select_scaled(scheme("mxfp8"), device_type, torch.float32)
        assert found.backend == "torch" and f"the package {package} is not installed" in found.reason
    select_scaled.cache_clear()


def test_a_selection_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    select_scaled.cache_clear()
    with caplog.at_level(logging.INFO, logger="bitwright.quantize.select"):
        for _ in range(3):
            fake_quantize(torch.randn(2, 64), scheme("mxfp6"))
    assert len([record for record in caplog.records if record.name == "bitwright.quantize.select"]) == 1


def test_refusals() -> None:
    with pytest.raises(SchemeError, match=r"torch\.float64.*choose another dtype"):
        select_rounding("fp8_e4m3", "cpu", torch.float64)
    with pytest.raises(UnknownName, match="did you mean 'nearest_even'"):
        select_rounding("fp8_e4m3", "cpu", torch.float32, "nearest_evn")
    with pytest.raises(UnknownName, match="did you mean 'saturate'"):
        select_rounding("fp8_e4m3", "cpu", torch.float32, "nearest_even", "saturat")
    with pytest.raises(UnknownName, match="did you mean 'fp8_e4m3'"):
        select_rounding("fp8_e4m", "cpu", torch.float32)
    with pytest.raises(UnknownName, match="nearest_even"):
        select_scaled(scheme("mxfp4"), "cpu", torch.float32, "nearest")
