"""Measuring a machine: what comes out is a device file, and slow formats are left out with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwright import hardware
from bitwright.errors import HardwareError
from bitwright.hardware import bench, profile


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
