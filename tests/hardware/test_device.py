"""Device files: the figures against outside tables, and every way a file can be wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from bitwright import formats, hardware
from bitwright.errors import HardwareError, UnknownName
from bitwright.hardware import read_device_file

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
        ("mi355x", "fp8_e4m3", 5000),
        ("h100-pcie", "bf16", 756),
        ("l40s", "fp8_e4m3", 733),
        ("rtx5090", "fp4_e2m1", 1676),
        ("rtx3090", "bf16", 71),
        ("tpu-v5e", "int8", 394),
        ("gaudi3", "bf16", 1677),
        ("jetson-orin", "int8", 85),
    ],
)
def test_peak_rates_are_dense(device: str, format: str, tflops: float) -> None:
    assert hardware.get(device).matmul_tflops[format] == tflops


@pytest.mark.parametrize(
    ("device", "format"),
    [
        ("v100", "bf16"),
        ("v100", "int8"),
        ("a100", "fp8_e4m3"),
        ("rtx-3090", "fp8_e4m3"),
        ("mi300x", "fp8_e4m3"),
        ("mi355x", "fp8_e4m3fnuz"),
        ("h100", "fp4_e2m1"),
        ("tpu-v5p", "fp16"),
        ("apple-m1", "bf16"),
    ],
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

    def test_matmul_rules_are_about_its_own_formats(self, device: hardware.Device) -> None:
        for rule in device.matmul_rules:
            assert set(rule.formats) <= set(device.matmul_tflops) and len(rule.source) > 10
            assert rule.in_features_multiple % (rule.group_size or 1) == 0
            assert rule.accumulator_bits is None or rule.accumulator_bits < 24

    def test_eight_bits_are_no_slower_than_sixteen(self, device: hardware.Device) -> None:
        rates = device.matmul_tflops
        eight = [rates[name] for name in rates if formats.FORMATS[name].bits == 8]
        assert all(rate >= rates.get("bf16", 0) for rate in eight)

    def test_names_and_aliases_find_it(self, device: hardware.Device) -> None:
        assert all(hardware.get(name.upper()) is device for name in (device.name, *device.aliases))

    def test_is_frozen(self, device: hardware.Device) -> None:
        with pytest.raises(FrozenInstanceError):
            device.year = 1999  # type: ignore[misc]
        with pytest.raises(TypeError):
            device.matmul_tflops["bf16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("device", "format", "group_size", "multiples", "accumulator_bits"),
    [
        # DeepSeek-V3, arXiv:2412.19437 section 3.3.2, says 14 bits; torch._scaled_mm takes multiples of 16
        ("h100", "fp8_e4m3", None, (16, 16), 14),
        ("h100", "fp8_e4m3", 128, (128, 128), None),
        ("b200", "fp8_e4m3", 32, (32, 32), None),
        ("b200", "fp4_e2m1", 16, (32, 32), None),
        ("b200", "fp8_e4m3", None, (16, 16), None),
    ],
)
def test_rules_of_known_products(
    device: str, format: str, group_size: int | None, multiples: tuple[int, int], accumulator_bits: int | None
) -> None:
    (rule,) = [
        rule for rule in hardware.get(device).matmul_rules if format in rule.formats and rule.group_size == group_size
    ]
    assert (rule.in_features_multiple, rule.out_features_multiple) == multiples
    assert rule.accumulator_bits == accumulator_bits


def test_where_fp8_is_no_faster_the_rates_say_so() -> None:
    for name in ("gaudi-3", "tpu-v6e"):
        rates = hardware.get(name).matmul_tflops
        assert rates["fp8_e4m3"] == rates["bf16"]


def test_unknown_device_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown device 'h1000'; did you mean 'h100'\? Known devices: .*h100-sxm"):
        hardware.get("h1000")


def test_names_are_sorted_and_hold_the_promised_ones() -> None:
    gpus = "v100-sxm2 v100-pcie a100-sxm a100-sxm-40gb a100-pcie h100-sxm h100-pcie h200-sxm b200 gb200 l4 l40s"
    others = "rtx-3090 rtx-4090 rtx-5090 mi300x mi355x gaudi-3 tpu-v5e tpu-v5p tpu-v6e jetson-agx-orin"
    promised = {*gpus.split(), *others.split(), "apple-m1", "apple-m4-max", "x86-avx512-bf16", "x86-amx"}
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
        (
            "[memory]",
            "[[matmul_rules]]\nformats = ['int8']\nsource = 'x'\ncertainty = 'read'\n[memory]",
            r"'matmul_rules\.0\.formats' names int8, which has no rate",
        ),
        (
            "[memory]",
            "[[matmul_rules]]\nformats = ['bf61']\nsource = 'x'\ncertainty = 'read'\n[memory]",
            r"'matmul_rules\.0\.formats\.bf61' is for an unknown format; did you mean 'bf16'",
        ),
        (
            "[memory]",
            "[[matmul_rules]]\nformats = ['bf16']\ngroup_size = 32\nsource = 'x'\ncertainty = 'read'\n[memory]",
            r"'matmul_rules\.0' has group_size 32 with scale_formats \[\]; give both",
        ),
        (
            "[memory]",
            "[[matmul_rules]]\nformats = ['bf16']\nin_features_multiple = 0\nsource = 'x'\n[memory]",
            r"'matmul_rules\.0\.in_features_multiple' is 0 .*also wrong: 'matmul_rules\.0\.certainty'",
        ),
        ("[memory]", "[achieved]\nlaunch_s = -1\n[memory]", r"'achieved\.launch_s' is -1"),
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
