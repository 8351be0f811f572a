"""`bitwright formats` and its commands: what a person reads, in 80 columns, without colour and with it."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitwright import formats, hardware
from bitwright.cli import main
from bitwright.cli.formats import native_devices
from bitwright.cli.number_text import spell_binary, spell_number, spell_percent, spell_signed, spell_step

FORMAT_FILE = """
[[format]]
name = "mine_e3m3"
kind = "float"
exponent_bits = 3
fraction_bits = 3
bias = 3
specials = "none"
source = "made up for this test"
golden = [[0x18, 1.0]]
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    """Run a command that has to succeed, and return what it prints."""

    def run(command: str) -> str:
        assert main(["formats", *command.split()]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def facts(text: str) -> dict[str, str]:
    """The (title, text) rows of `show`, wrapped lines joined."""
    found: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        match = re.match(r"(\S+(?: \S+)*)  +(\S.*)", line)
        if match:
            title = match.group(1)
            found[title] = match.group(2).strip()
        elif title and line.startswith("  "):
            found[title] += " " + line.strip()
    return found


def in_new_process(*arguments: str, encoding: str = "utf-8", **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from bitwright.cli import main; sys.exit(main(sys.argv[1:]))"
    variables = {**os.environ, "PYTHONPATH": str(Path(formats.__file__).parents[2]), **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, encoding=encoding, env=variables, check=False
    )


@pytest.mark.parametrize("columns", ["80", "100", "160"])
def test_the_tables_fit_the_terminal_and_miss_nothing(printed, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = printed("")
    assert max(map(len, out.splitlines())) <= int(columns)
    first_words = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert all(first_words.count(name) >= 1 for name in (*formats.names(), *formats.block_names()))
    for figure in ("65504", "57344", "448", "5.96e-08", "6.1e-05", "0.00195", "Inf NaN", "4.25", "ocp_floor"):
        assert figure in out
    (line,) = [line for line in out.splitlines() if line.startswith("fp8_e5m2 ")]
    assert line.split()[:2] == ["fp8_e5m2", "8"] and " 4  Inf NaN" in line
    assert ("layout" in out.splitlines()[1]) == (columns == "100" or columns == "160")
    assert all(device in out for device in ("h100", "h200", "b200", "mi300x"))


def test_a_wide_terminal_has_the_devices_in_the_table(printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    (line,) = [line for line in printed("").splitlines() if line.startswith("fp8_e4m3 ")]
    assert "h100, h200" in line and "mi300x" not in line


@pytest.mark.parametrize("columns", ["40", "60"])
@pytest.mark.parametrize("command", ["", "show fp64 0.1", "show mxfp4 1 0.1", "show bf16", "compare 3e-5 70000 -1"])
def test_narrow_terminals_get_what_80_columns_show(printed, monkeypatch, columns: str, command: str) -> None:
    expected = printed(command)
    monkeypatch.setenv("COLUMNS", columns)
    assert printed(command) == expected


def test_long_names_cut_no_number(tmp_path: Path) -> None:
    name = "a_name_that_leaves_no_room_for_the_numbers_beside_it_in_eighty_columns"
    (tmp_path / "my.toml").write_text(FORMAT_FILE.replace("mine_e3m3", name), encoding="utf-8")
    listed = in_new_process("formats", "--format-file", "my.toml").stdout
    (row,) = [line.split() for line in listed.splitlines() if line.startswith("a_name")]
    assert row[:3] == [name, "7", "30"]
    word = "0." + 90 * "1"
    assert word in in_new_process("formats", "show", "mxfp4", word).stdout.splitlines()[-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", [["show", "bf16", "-0.1"], ["compare", "-0", "70000"], [], ["show", "mxfp4", "-1"]])
def test_encodings_without_our_characters_show_look_alikes(encoding: str, command: list[str]) -> None:
    shown = in_new_process("formats", *command, encoding=encoding, PYTHONIOENCODING=encoding)
    assert (shown.returncode, shown.stderr) == (0, "")
    usual = in_new_process("formats", *command).stdout
    assert [len(line) for line in shown.stdout.splitlines()] == [len(line) for line in usual.splitlines()]
    if command[:2] == ["show", "bf16"]:
        assert re.search(r"^value +-0\.10009765625 *$", shown.stdout, flags=re.MULTILINE)


def test_errors_and_json_survive_ascii() -> None:
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = in_new_process("formats", "show", "bf16", "0.1", **environment)
    assert shown.returncode == 0 and "-2^-11" in shown.stdout and shown.stdout.isascii()
    refused = in_new_process("formats", "show", "bf16", "−x", **environment)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr
    usual, escaped = (in_new_process("formats", "--json", **more).stdout for more in ({}, environment))
    assert escaped.isascii() and not usual.isascii() and json.loads(escaped) == json.loads(usual)


def test_native_means_a_rate_in_the_device_file() -> None:
    native = native_devices()
    assert "h100" in native["fp8_e4m3"] and "a100" not in native["fp8_e4m3"]
    assert native["fp8_e4m3fnuz"] == ("mi300x",)
    assert sum(map(len, native.values())) == sum(len(device.matmul_tflops) for device in hardware.devices())


def test_json_is_for_machines(printed) -> None:
    tables = json.loads(printed("--json"))
    rows = {row["name"]: row for row in tables["formats"]}
    assert set(rows) == set(formats.names())
    assert rows["fp16"]["max"] == 65504 and rows["fp16"]["min_subnormal"] == 2.0**-24
    assert "b200" in rows["fp4_e2m1"]["native"]
    assert {row["name"] for row in tables["block_formats"]} == set(formats.block_names())


def test_show_a_tenth_in_bf16(printed) -> None:
    out = printed("show bf16 0.1")
    names, bits = out.splitlines()[1:3]
    assert [word.strip() for word in names.split("│")] == ["sign", "exponent", "fraction"]
    assert [word.strip() for word in bits.split("│")] == ["0", "01111011", "1001101"]
    assert names.index("│") == bits.index("│")
    rows = facts(out)
    assert rows["code"].startswith("0x3dcd = 0b0_01111011_1001101")
    assert rows["value"] == "0.10009765625"
    assert rows["error"] == "+0.00009765625, +0.0977 %, +0.2 ulp"
    assert rows["1 ulp"] == "2^-11, the step of bf16 at 0.1"
    assert rows["below"] == "0.099609375 (0x3dcc), −2^-11"
    assert rows["above"] == "0.1005859375 (0x3dce), +2^-11"
    assert rows["class"].startswith("normal: 2^-4 × 1.6015625; exponent −4 = field 123 − bias 127")
    assert rows["overflow"].startswith("no; beyond 3.38953e38: saturate, te → 3.38953e38; ieee, torch")
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("text", ["0.1", "-0.1", "-0", "1e-45", "0x1.8p3", "-1e-5", "3.14159", "1e39", "-inf"])
def test_codes_are_those_of_struct(printed, text: str) -> None:
    value = float.fromhex(text) if "x" in text else float(text)
    with np.errstate(over="ignore"):
        code = struct.pack(">f", np.float32(value)).hex()
    assert f"0x{code} = 0b" in printed(f"show fp32 {text}")


@pytest.mark.parametrize(
    ("command", "title", "text"),
    [
        ("show fp16 3e-5", "class", "subnormal: 503 × 2^-24; 9 of 11 significant bits left"),
        ("show fp32 1e-45", "value", "≈ 1.4012984643248171e-45; exactly 2^-149"),
        ("show fp64 0.1", "value", "0.1000000000000000055511151231257827021181583404541015625"),
        ("show bf16 1.5", "error", "none: the number is kept exactly"),
        (
            "show fp16 70000",
            "overflow",
            "yes, and ieee was applied: saturate, te → 65504; ieee, torch, ml_dtypes → Inf",
        ),
        ("show fp16 70000 --overflow saturate", "value", "65504"),
        ("show fp8_e4m3 nan", "value", "NaN"),
        ("show torch.float8_e4m3fn 448", "above", "none"),
        ("show int8 -3.7", "code", "0xfc = 0b1_1111100"),
        ("show int8 200", "overflow", "yes, and ieee was applied: every rule → 127"),
        ("show nf4 --code 8", "value", "0.07958029955625534"),
        ("show nf4 0.3", "class", "codebook entry 11 of 0 to 15"),
        ("show e8m0 3", "code", "0x81 = 0b10000001"),
        ("show bf16 --code 0x8000", "value", "−0"),
        ("show bf16 --code 0b0_11111111_1000000", "class", "NaN"),
        ("show bf16 0.1 --rounding down", "value", "0.099609375"),
        ("show bf16 -0.1 --rounding up", "value", "−0.099609375"),
        ("show fp16", "range", "−65504 to 65504"),
        ("show mxfp4", "bits per value", "4.25, the block's scale included"),
    ],
)
def test_show_tells(printed, command: str, title: str, text: str) -> None:
    assert facts(printed(command))[title].startswith(text[:60])


def test_stochastic_rounding_shows_both_outcomes_with_their_chances(printed) -> None:
    out = printed("show bf16 0.1 --rounding stochastic")
    assert "0.1 in bf16, with chance 20 %" in out and "0.1 in bf16, with chance 80 %" in out
    assert "0x3dcc = " in out and "0x3dcd = " in out


def test_several_numbers_are_shown_one_after_the_other(printed) -> None:
    out = printed("show fp16 1 -2 0.5")
    assert [code for code in re.findall(r"^code +(\S+)", out, flags=re.MULTILINE)] == ["0x3c00", "0xc000", "0x3800"]


def test_show_a_block(printed) -> None:
    """OCP MX 1.0 §6.3: amax 7 lies in [4, 8), E2M1's largest exponent is 2: scale 2^0; 3.5 ties to 4, 7 saturates."""
    out = printed("show mxfp4 1 2 3.5 0.1 -7")
    assert facts(out)["scale"].startswith("1 (0x7f in e8m0)")
    cells = [re.split(r" {2,}", line.strip()) for line in out.splitlines()[-5:]]
    assert cells == [
        ["1", "0x2", "1", "exact"],
        ["2", "0x4", "2", "exact"],
        ["3.5", "0x6", "4", "+0.5", "+14.3 %"],
        ["0.1", "0x0", "0", "−0.1", "−100 %"],
        ["-7", "0xf", "−6", "+1", "−14.3 %"],
    ]


def test_one_number_is_no_plural(printed) -> None:
    out = printed("show mxfp4 0.1")
    assert out.startswith("1 number in mxfp4\n") and "1 of 1 number was rounded to fp32" in out
    out = printed("show mxfp4 0.1 0.2 1")
    assert out.startswith("3 numbers in mxfp4\n") and "2 of 3 numbers were rounded to fp32" in out
    assert "with 1 zero:" in printed("show q4_0 " + "1 " * 31)


def test_the_sign_of_zero_is_seen_to_be_lost(printed) -> None:
    out = printed("compare -0 --formats bf16,int8,fp8_e4m3fnuz,nf4,uint4")
    assert re.findall(r"^(\S+) +(exact|→ \+0) *$", out, flags=re.MULTILINE) == [
        ("bf16", "exact"),
        *((name, "→ +0") for name in ("int8", "fp8_e4m3fnuz", "nf4", "uint4")),
    ]
    assert facts(printed("show int8 -0"))["error"] == "none, but the sign of the zero is lost"
    assert "sign lost" in printed("show bfp8 -0 1") and "sign lost" not in printed("show mxfp4 -0 0 1")


def test_below_the_smallest_value_is_saturation(printed) -> None:
    assert re.search(r"^e8m0 +saturated at 5\.88e-39$", printed("compare 1e-40 --formats e8m0"), flags=re.MULTILINE)
    assert facts(printed("show e8m0 1e-40"))["overflow"].startswith(
        "yes, and ieee was applied: every rule → 5.87747e-39"
    )


def test_show_two_blocks_and_blocks_of_bytes(printed) -> None:
    out = printed("show bfp8 " + "1 " * 8 + "64")
    assert "scale of block 0" in out and "scale of block 1" in out and "64 (0x85 in e8m0)" in out
    out = printed("show q4_0 1 -8")
    assert "00 3c" in out  # d = −8 / −8 = 1, an fp16 with its low byte first
    assert "with 30 zeros" in out


def test_compare(printed) -> None:
    out = printed("compare 3e-5 70000")
    cells = {line.split()[0]: re.split(r" {2,}", line.strip())[1:] for line in out.splitlines()[2:-1]}
    assert {name for name in cells if name in formats.FORMATS} == set(formats.names())
    assert cells["fp16"] == ["subnormal −0.0629 %", "→ Inf"]
    assert cells["fp32"][1] == "exact"
    assert cells["fp8_e4m3"] == ["→ 0", "→ NaN"]
    assert cells["fp4_e2m1"] == ["→ 0", "saturated at 6"]
    assert cells["bf16"] == ["rounded +0.136 %", "rounded +0.206 %"]
    assert max(map(len, out.splitlines())) <= 80


def test_compare_some_formats_by_another_rule(printed) -> None:
    out = printed("compare -460 nan --formats float8_e4m3fn,int8 --overflow saturate --rounding up")
    lines = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    assert ["fp8_e4m3", "rounded −2.61 %", "exact"] in lines
    assert ["int8", "saturated at −128", "has no NaN"] in lines


def test_many_numbers_take_several_tables(printed) -> None:
    out = printed("compare 1 2 3 4 5 6 7 --formats fp16")
    assert max(map(len, out.splitlines())) <= 80
    assert sum(line.startswith("fp16 ") for line in out.splitlines()) == 3 and out.count("exact") == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("show b16 0.1", "did you mean 'bf16'"),
        ("show bf16 zero", "'zero' is no number"),
        ("show bf16 1 0.1x", "'0.1x' is no number"),
        ("show bf16 0x3dcd", "--code 0x3dcd"),
        ("show bf16 --code 0x1ffff", "give one from 0 to 0xffff"),
        ("show bf16 --code 1 2", "one or the other"),
        (
            "show bf16 1 --rouding up",
            "no such option: --rouding; did you mean '--rounding'? See: bitwright formats show --help",
        ),
        ("show bf16 1 -x", "no such option: -x"),
        ("show bf16 1 --rounding nearest", "did you mean 'nearest_even'"),
        ("show bf16 1 --overflow torc", "did you mean 'torch'"),
        ("show fp4_e2m1 nan", "has no NaN"),
        ("show mxfp4 --code 1", "stores blocks"),
        ("show mxfp4 1 --rounding stochastic", "draws"),
        ("show", "FORMAT'; see: bitwright formats show --help"),
        ("compare", "NUMBER"),
        ("compare 1 --formats ,", "names no format"),
        ("compare 1 --formats bf16,fp61", "unknown format 'fp61'"),
        ("compare 1 --formats mxfp4", "bitwright formats show mxfp4"),
        ("compare 1 --format bf16", "did you mean '--formats'"),
        ("compare 1e9999", "beyond ±5000"),
        ("shw bf16 1", "Did you mean 'show'? See: bitwright formats --help"),
        ("--jsn", "--jsn"),
        ("--format-file nowhere.toml", "nowhere.toml"),
        ("show bf16 1 --format-file nowhere.toml", "nowhere.toml"),
    ],
)
def test_bad_input_is_one_sentence_and_2(capsys, arguments: str, sentence: str) -> None:
    assert main(["formats", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err


def test_formats_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(FORMAT_FILE, encoding="utf-8")
    shown = in_new_process("formats", "show", "mine_e3m3", "1.2", "--format-file", "my.toml")
    assert shown.returncode == 0 and "0x1a = 0b0_011_010" in shown.stdout  # 1.25 = 2^0 · (1 + 2/8)
    listed = in_new_process("formats", "--format-file", "my.toml")
    assert listed.returncode == 0 and re.search(r"^mine_e3m3 +7 ", listed.stdout, flags=re.MULTILINE)
    compared = in_new_process("formats", "--format-file", "my.toml", "compare", "99", "--formats", "mine_e3m3")
    assert "saturated at 30" in compared.stdout
    (tmp_path / "my.toml").write_text(FORMAT_FILE.replace("[[0x18, 1.0]]", "[[0x18, 1.0], [0x01, 0.03125]]"))
    twice = ["--format-file", "my.toml", "show", "mine_e3m3", "1.2", "--format-file", "./my.toml"]
    shown = in_new_process("formats", *twice, "--format-file", "my.toml")
    assert shown.returncode == 0 and "0x1a = " in shown.stdout
    (tmp_path / "other.toml").write_text(FORMAT_FILE.replace("bias = 3", "bias = 4").replace("[[0x18, 1.0]]", "[]"))
    refused = in_new_process("formats", "--format-file", "my.toml", "--format-file", "other.toml")
    assert refused.returncode == 2 and "'mine_e3m3' is defined twice: in my.toml and other.toml" in refused.stderr


def test_fields_and_fates_are_coloured_on_a_terminal() -> None:
    shown = in_new_process("formats", "show", "bf16", "0.1", FORCE_COLOR="1", TERM="xterm-256color").stdout
    bits = shown.splitlines()[2]
    colours = re.findall(r"\x1b\[1;(\d+)m(\d+)", bits)
    assert [digits for _, digits in colours] == ["0", "01111011", "1001101"]
    assert len({colour for colour, _ in colours}) == 3 and bits.count("│") == 2
    compared = in_new_process("formats", "compare", "1", "99999", FORCE_COLOR="1", TERM="xterm-256color").stdout
    assert re.search(r"\x1b\[32mexact", compared) and re.search(r"\x1b\[1;31m→ Inf", compared)


def test_numbers_are_spelt_to_the_last_digit() -> None:
    from fractions import Fraction

    assert spell_number(Fraction(1, 2**20), digits=60) == "9.5367431640625e-7"
    assert spell_number(Fraction(2) ** 127) == "170141183460469231731687303715884105728"
    assert spell_number(Fraction(1, 3), digits=5) == "≈ 0.33333"
    assert spell_number(-0.0) == "−0" and spell_number(float("-inf")) == "−Inf"
    assert spell_signed(Fraction(3, 2)) == "+1.5" and spell_signed(Fraction(-3, 2)) == "−1.5"
    assert spell_binary(Fraction(5, 8)) == "5 × 2^-3" and spell_binary(Fraction(-1, 2)) == "−2^-1"
    assert spell_binary(Fraction(512)) == "512" and spell_binary(Fraction(2) ** 104) == "2^104"
    assert spell_step(Fraction(3, 8)) == "0.375" and spell_step(Fraction(1, 2048)) == "2^-11"
    assert spell_percent(Fraction(-1, 3)) == "−33.3 %" and spell_percent(Fraction(1, 10**7)) == "+1.00e-5 %"
