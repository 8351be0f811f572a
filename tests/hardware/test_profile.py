"""Measuring a machine: what comes out is a device file, and slow formats are left out with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwright import hardware
from bitwright.errors import HardwareError
from bitwright.hardware import bench, profile
from bitwright.quantize.packed_products import PackedWeights


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices, no repeats beyond the least: what is tested is the bookkeeping."""
    effort = bench.Effort(shapes=((64, 64, 64), (32, 128, 64)), streamed_bytes=2**16, slice_s=0.001)
    monkeypatch.setattr(profile, "_effort", lambda *, gpu, quick: effort)
    monkeypatch.setattr(bench, "MATVEC", (256, 128))


@pytest.mark.usefixtures("tiny")
def test_a_profile_is_a_device_file(tmp_path: Path) -> None:
    done: list[str] = []
    measured = profile.measure(name="here", on_done=done.append)
    assert len(done) == len(profile.jobs(gpu=profile.has_gpu()))
    device = measured.device
    assert set(device.certainties.values()) == {"measured"}
    assert {"fp32"} <= set(device.matmul_tflops) and set(device.matmul_tflops) == set(device.achieved_matmul_tflops)
    assert all(device.achieved_matmul_tflops[name] <= rate for name, rate in device.matmul_tflops.items())
    assert device.achieved_memory_gb_per_s is not None
    assert device.achieved_memory_gb_per_s <= device.memory_gb_per_s
    assert device.launch_s is not None and 0 < device.launch_s < 1e-2
    path = tmp_path / "here.toml"
    path.write_text(hardware.write_device_text(device), encoding="utf-8")
    assert hardware.read_device_file(path) == device


@pytest.mark.usefixtures("tiny")
def test_bandwidth_by_format_and_packed_weights(tmp_path: Path) -> None:
    """What torch cannot do is listed with its reason; packed weights are counted with their scales."""
    measured = profile.measure(name="here", packed=PackedWeights())
    bandwidths = measured.device.achieved_gb_per_s
    assert set(bandwidths["copy"]) == {"fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2"}
    assert {"fp32", "int8"} <= set(bandwidths["read"])
    assert {"fp32", "int8", "fp8_e4m3", "fp8_e5m2", "int4"} <= set(bandwidths["matvec"])
    for way in ("read int4", "copy int4"):
        assert "lies packed in bytes" in measured.skipped[way]
    assert "int4" in measured.skipped and "int4" not in measured.device.matmul_tflops
    asked = {job.place for job in profile.jobs(gpu=profile.has_gpu(), packed=PackedWeights())}
    done = {figure.job.place for figure in measured.figures}
    assert done | set(measured.skipped) == asked and not done & set(measured.skipped)
    for figure in measured.figures:
        assert figure.value > 0 and (figure.how != "") == (figure.job.what == "packed")
    path = tmp_path / "here.toml"
    path.write_text(hardware.write_device_text(measured.device), encoding="utf-8")
    assert hardware.read_device_file(path) == measured.device
    assert "[achieved.matvec_gb_per_s]" in path.read_text(encoding="utf-8")


def test_packed_weights_take_the_bytes_of_codes_and_scales() -> None:
    """64 rows of 256: one byte a number and two of scale a row; half a byte, and two of scale for each 128."""
    import torch

    x, weight = torch.randn(3, 256), torch.randn(64, 256)
    for name, num_bytes, error in (("int8", 64 * 258, 0.01), ("int4", 64 * (128 + 4), 0.15)):
        run, found, how = PackedWeights().prepare(name, x, weight)
        y = run()
        assert isinstance(y, torch.Tensor) and how
        assert num_bytes <= found <= 1.1 * num_bytes
        assert float((y - x @ weight.T).norm() / (x @ weight.T).norm()) < error


def test_a_bandwidth_of_an_unknown_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    text = hardware.write_device_text(hardware.get("x86-avx512-bf16"))
    section = '[achieved.copy_gb_per_s]\nfp9 = 3.0\nsource = "here"\ncertainty = "measured"\n'
    path.write_text(f"{text}\n{section}", encoding="utf-8")
    with pytest.raises(HardwareError, match=r"field 'achieved\.copy_gb_per_s\.fp9' is for an unknown format"):
        hardware.read_device_file(path)


@pytest.mark.usefixtures("tiny")
def test_a_loop_for_reference_is_skipped_and_the_reason_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    product = bench.Bench.product

    def with_a_slow_int8(self: bench.Bench, name: str, m: int, n: int, k: int) -> Callable[[], object]:
        multiply = product(self, name, m, n, k)
        return (lambda: (time.sleep(0.1), multiply())) if name == "int8" else multiply

    monkeypatch.setattr(bench.Bench, "product", with_a_slow_int8)
    measured = profile.measure(name="here")
    assert "less than a tenth" in measured.skipped["int8"]
    assert "int8" not in measured.device.matmul_tflops
    assert any(note.startswith("int8 skipped: ") for note in measured.device.notes)


def test_jobs_cover_what_a_device_file_needs() -> None:
    kinds = {job.what for job in profile.jobs(gpu=False)}
    assert kinds == {"matmul", "matvec", "read", "copy", "launch"}
    assert "tf32" in {job.format for job in profile.jobs(gpu=True)} - {job.format for job in profile.jobs(gpu=False)}
    assert len(profile.jobs(gpu=False, quick=True)) < len(profile.jobs(gpu=False))


def test_products_multiply_what_they_say() -> None:
    import torch

    runner = bench.Bench(gpu=False, effort=bench.Effort(shapes=(), streamed_bytes=64, slice_s=0.0))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int32)):
        product = runner.product(name, 32, 16, 64)()
        assert isinstance(product, torch.Tensor)
        assert product.dtype == dtype and product.shape == (32, 16)


def test_a_name_that_is_none_is_refused_before_measuring() -> None:
    with pytest.raises(HardwareError, match="cannot be called 'My Server'; use lower-case"):
        profile.measure(name="My Server")


@pytest.mark.parametrize("device", hardware.devices(), ids=lambda device: device.name)
def test_every_device_can_be_written_and_read(device: hardware.Device, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(hardware.write_device_text(device), encoding="utf-8")
    assert hardware.read_device_file(path) == device
