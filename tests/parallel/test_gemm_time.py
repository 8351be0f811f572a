"""Times of products: published ones, waves, bounds; and records of what kernels reach."""

from __future__ import annotations

import statistics

import pytest

from bitwright import hardware
from bitwright.errors import HardwareError
from bitwright.hardware.roofline import matmul_time
from bitwright.parallel.efficiency import DEFAULT, EFFICIENCIES, efficiency_of, parse_efficiency, read_efficiency_file
from bitwright.parallel.gemm_time import gemm_time, quantize_time_s

#: (device, m, n, k) → microseconds: microsoft/vidur, data/profiling/compute, fp16 with cuBLAS.
PUBLISHED = {
    ("h100-sxm", 1, 57344, 8192): 311.0,
    ("h100-sxm", 8, 22016, 4096): 64.0,
    ("h100-sxm", 64, 12288, 4096): 40.0,
    ("h100-sxm", 256, 8192, 8192): 64.0,
    ("h100-sxm", 1024, 4096, 4096): 49.0,
    ("h100-sxm", 4096, 12288, 4096): 584.0,
    ("h100-sxm", 4096, 7168, 8192): 643.0,
    ("a100-sxm", 1, 4096, 4096): 25.0,
    ("a100-sxm", 8, 8192, 28672): 290.0,
    ("a100-sxm", 64, 10240, 8192): 116.0,
    ("a100-sxm", 1024, 8192, 28672): 2254.0,
    ("a100-sxm", 4096, 8192, 8192): 2377.0,
    ("a100-sxm", 4096, 57344, 8192): 15940.5,
}


def seconds(device_name: str, m: int, n: int, k: int, **more: object) -> float:
    device = hardware.get(device_name)
    return gemm_time(device, efficiency_of(device)[0], m=m, n=n, k=k, **more).seconds  # type: ignore[arg-type]


def test_published_products_are_met() -> None:
    errors = [
        abs(seconds(device, m, n, k, format="fp16") / (1e-6 * us) - 1) for (device, m, n, k), us in PUBLISHED.items()
    ]
    assert statistics.fmean(errors) < 0.10
    assert max(errors) < 0.30


def test_a_tile_more_than_there_are_processors_takes_another_wave() -> None:
    # 132 processors: 12 · 11 tiles of 128 × 256 are one wave, 12 · 12 are two.
    one, two = (seconds("h100-sxm", 12 * 128, columns * 256, 8192) for columns in (11, 12))
    assert two / one > 1.3


@pytest.mark.parametrize("device_name", ["h100-sxm", "a100-sxm", "mi300x", "b200"])
@pytest.mark.parametrize("sizes", [(1, 4096, 4096), (512, 4096, 11008), (8192, 8192, 8192)])
def test_nothing_is_faster_than_the_roofline(device_name: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    device = hardware.get(device_name)
    least = matmul_time(device, tokens=m, out_features=n, in_features=k, weight_bits=16, compute_format="bf16")
    assert seconds(device_name, m, n, k) >= least.seconds


def test_more_work_takes_longer() -> None:
    times = [seconds("a100-sxm", m, 4096, 4096) for m in (1, 64, 512, 4096, 32768)]
    assert times == sorted(times)


def test_fp8_is_faster_where_there_is_work_and_codes_cost() -> None:
    wide, narrow = (seconds("h100-sxm", 8192, 8192, 8192, format=name) for name in ("bf16", "fp8_e4m3"))
    assert 1.4 < wide / narrow < 2.0
    device = hardware.get("h100-sxm")
    record = efficiency_of(device)[0]
    delayed = quantize_time_s(device, record, values=8192**2, to_bits=8)
    current = quantize_time_s(device, record, values=8192**2, to_bits=8, needs_amax_pass=True)
    # Read 2 bytes and write 1, or read 2 bytes once more.
    assert current / delayed == pytest.approx(5 / 3, rel=0.1)


def test_records_are_of_known_devices_and_say_where_they_are_from() -> None:
    for name in EFFICIENCIES.names:
        assert hardware.get(name).name == name
        assert EFFICIENCIES.get(name).source


def test_a_device_without_a_record_says_so() -> None:
    record, reason = efficiency_of(hardware.get("mi300x"))
    assert record is DEFAULT
    assert "nobody's products on mi300x" in reason


def test_a_damaged_file_is_named_with_its_field(tmp_path: object) -> None:
    with pytest.raises(HardwareError, match=r"'mine.toml': field 'num_units'"):
        parse_efficiency(b'device = "h100-sxm"\n', "mine.toml")
    with pytest.raises(HardwareError, match="is no TOML"):
        parse_efficiency(b"device = ", "mine.toml")
    with pytest.raises(HardwareError, match="cannot be read"):
        read_efficiency_file("nowhere.toml")
    with pytest.raises(HardwareError, match="m is 0"):
        seconds("h100-sxm", 0, 1, 1)
