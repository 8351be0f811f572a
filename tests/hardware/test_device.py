"""Device files: the figures against outside tables, and every way a file can be wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from bitwright import formats, hardware
from bitwright.errors import HardwareError, UnknownName
from bitwright.hardware.device import read_device_file

GOOD = """
name = "toy"
vendor = "nobody"
kind = "gpu"
year = 2024

[memory]
capacity_bytes = 1_000
bandwidth_gb_per_s = 10
source = "a table"
certainty = "read"

[matmul_tflops]
bf16 = 2
source = "a table"
certainty = "read"
"""


@pytest.mark.parametrize(
    ("device", "format", "tflops"),
    [
        # dense rates: NVIDIA's data sheets print the H100's with sparsity, twice these
        ("h100", "bf16", 989.4),
        ("h100", "fp16", 989.4),
        ("h100", "tf32", 494.7),
        ("h100", "fp8_e4m3", 1978.9),
        ("h100", "int8", 1978.9),
        ("h200", "fp8_e4m3", 1978.9),
        ("a100", "bf16", 312),
        ("a100", "int8", 624),
        ("v100", "fp16", 125),
        ("b200", "fp4_e2m1", 9000),
        ("l4", "fp8_e4m3", 242),
        ("rtx4090", "fp16", 165.2),
        ("mi300x", "fp8_e4m3fnuz", 2614),
    ],
)
def test_peak_rates_are_dense(device: str, format: str, tflops: float) -> None:
    assert hardware.get(device).matmul_tflops[format] == tflops


@pytest.mark.parametrize(
    ("device", "format"),
    [("v100", "bf16"), ("v100", "int8"), ("a100", "fp8_e4m3"), ("mi300x", "fp8_e4m3"), ("h100", "fp4_e2m1")],
)
def test_what_a_chip_lacks_is_absent(device: str, format: str) -> None:
    assert format not in hardware.get(device).matmul_tflops


@pytest.mark.parametrize("device", hardware.devices(), ids=lambda device: device.name)
class TestEveryDevice:
    """Laws of the catalog."""

    def test_sections_have_sources(self, device: hardware.Device) -> None:
        assert {"memory", "matmul_tflops"} <= set(device.sources)
        assert all(len(source) > 10 for source in (*device.sources.values(), *(link.source for link in device.links)))
        assert set(device.sources) == set(device.certainties)

    def test_formats_are_known_and_figures_positive(self, device: hardware.Device) -> None:
        rates = (device.matmul_tflops, device.achieved_matmul_tflops)
        assert all(name in formats.names() and value > 0 for table in rates for name, value in table.items())
        assert device.memory_bytes > 0 and device.memory_gb_per_s > 0

    def test_achieved_stays_below_peak(self, device: hardware.Device) -> None:
        for name, value in device.achieved_matmul_tflops.items():
            assert value <= device.matmul_tflops[name]
        assert (device.achieved_memory_gb_per_s or 0) <= device.memory_gb_per_s

    def test_names_and_aliases_find_it(self, device: hardware.Device) -> None:
        assert all(hardware.get(name.upper()) is device for name in (device.name, *device.aliases))

    def test_is_frozen(self, device: hardware.Device) -> None:
        with pytest.raises(FrozenInstanceError):
            device.year = 1999  # type: ignore[misc]
        with pytest.raises(TypeError):
            device.matmul_tflops["bf16"] = 1.0  # type: ignore[index]


def test_unknown_device_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown device 'h1000'; did you mean 'h100'\? Known devices: .*h100-sxm"):
        hardware.get("h1000")


def test_names_are_sorted_and_hold_the_promised_ones() -> None:
    promised = {"v100-sxm2", "a100-sxm", "h100-sxm", "h200-sxm", "b200", "l4", "rtx-4090", "mi300x", "x86-avx512-bf16"}
    assert promised <= set(hardware.names())
    assert list(hardware.names()) == sorted(hardware.names())


def test_a_users_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(GOOD)
    device = read_device_file(path)
    assert (device.name, device.memory_gb_per_s, device.matmul_tflops["bf16"]) == ("toy", 10.0, 2.0)
    assert device.achieved_matmul_tflops == {} and device.links == ()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("capacity_bytes = 1_000\n", "", r"toy\.toml': field 'memory\.capacity_bytes' is missing; add it"),
        ("bandwidth_gb_per_s = 10", "bandwidth_gb_per_s = -1", r"'memory\.bandwidth_gb_per_s' is -1"),
        ("bandwidth_gb_per_s = 10", "bandwidth_gb_per_s = 0", r"'memory\.bandwidth_gb_per_s' is 0"),
        ("bandwidth_gb_per_s = 10", "bandwidth_gb_per_s = nan", r"'memory\.bandwidth_gb_per_s' is nan"),
        ("bandwidth_gb_per_s = 10", "bandwidth_gb_per_s = '10'", r"'memory\.bandwidth_gb_per_s' is '10'"),
        ("bandwidth_gb_per_s = 10", "bandwidth_gb_per_s = true", r"'memory\.bandwidth_gb_per_s' is True"),
        ("bf16 = 2", "bf16 = -2", r"'matmul_tflops\.bf16' is -2 but should be greater than 0"),
        ("bf16 = 2", "bf61 = 2", r"'matmul_tflops\.bf61' is for an unknown format; did you mean 'bf16'\?"),
        ("bf16 = 2\n", "", r"\[matmul_tflops\] has no rate; give at least one"),
        ('source = "a table"', "", r"'memory\.source' is missing.*also wrong: 'matmul_tflops\.source'"),
        ("year = 2024", "yaer = 2024", r"also wrong: 'yaer'"),
        ('kind = "gpu"', 'kind = "gpu"\ncolour = "red"', r"field 'colour' is unknown; remove it"),
        ('kind = "gpu"', 'kind = "toaster"', r"field 'kind' is 'toaster'"),
        ('certainty = "read"', 'certainty = "sure"', r"'memory\.certainty' is 'sure'"),
        ("[memory]", "[memory", r"is no TOML .*line 7"),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "toy.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(HardwareError, match=says):
        read_device_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"nowhere\.toml' cannot be read"):
        read_device_file(tmp_path / "nowhere.toml")


def test_bytes_that_are_no_text_are_no_toml(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match="is no TOML"):
        read_device_file(tmp_path / "x.toml")
