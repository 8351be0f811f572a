"""``bitwright formats histogram``: what is printed and written, and that bad input ends in one sentence and exit 2."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bitwright import formats
from bitwright.cli import main

SIGNED = [name for name in formats.names() if name != "e8m0" and not name.startswith("uint")]

COMMAND = ("formats", "histogram")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Magnitudes whose fate is known: 2**-12 is 0 in E4M3, 2**-8 subnormal, 1 normal, 1024 too large."""
    known = torch.tensor([2.0**-12] * 1 + [2.0**-8] * 2 + [1.0] * 4 + [1024.0] * 1)
    save_file(
        {"layer.known": known, "layer.zeros": torch.zeros(8).bfloat16(), "[bold]ids": torch.arange(3)},
        tmp_path / "a.safetensors",
    )
    return tmp_path / "a.safetensors"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([*COMMAND, *arguments])
    return code, *capsys.readouterr()


def test_shares_and_octaves_of_known_values(capsys, checkpoint: Path) -> None:
    code, out, err = run(capsys, "a.safetensors", "--formats", "fp8_e4m3,bf16")
    assert code == 0
    assert "16 in 2 tensors; 8 zeros" in out
    assert "1 tensor with no floats of whole bytes: 1 of I64" in out
    assert re.search(r"^fp8_e4m3 +448 +6\.25 % +12\.5 % +6\.25 % ", out, flags=re.MULTILINE)
    assert re.search(r"^bf16 +3\.38953e\+38 +0 +0 +0 +exact", out, flags=re.MULTILINE)
    signs = {
        row[1]: (row[2], row[3]) for row in re.finditer(r"^ *(2\^-?\d+) .* ([█▒0>]) +([█▒0>])\s*$", out, flags=re.M)
    }
    assert signs["2^10"] == (">", "█")
    assert signs["2^0"] == ("█", "█")
    assert signs["2^-8"] == ("▒", "█")
    assert signs["2^-12"] == ("0", "█")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out and "read at" in err


def test_tensors_are_chosen_and_listed(capsys, checkpoint: Path) -> None:
    code, out, _ = run(capsys, ".", "--tensor", "layer.k*", "--per-tensor", "--formats", "torch.float8_e4m3fn")
    assert code == 0
    assert "8 in 1 tensor;" in out and "layer.zeros" not in out
    assert re.search(r"^layer\.known +1024 +25\.0\s*$", out, flags=re.MULTILINE)


def test_scaled_puts_the_largest_on_the_largest(capsys, checkpoint: Path) -> None:
    code, out, _ = run(capsys, "a.safetensors", "--scaled", "--formats", "fp8_e4m3")
    assert code == 0
    # 1024 → 448: 1 → 0.4375, 2**-8 → 0.0017 (subnormal), 2**-12 → 0.0001 (0).
    assert re.search(r"^fp8_e4m3 +448 +6\.25 % +12\.5 % +0 ", out, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["plot.png", "plot.html"])
def test_a_plot_is_written_where_asked(capsys, checkpoint: Path, name: str) -> None:
    code, out, _ = run(capsys, "a.safetensors", "--out", name)
    assert code == 0 and f"plot  {name}" in out
    assert Path(name).stat().st_size > 10_000


@pytest.mark.parametrize("more", [[], ["--scaled"]])
def test_every_format_and_long_names_fit_80_columns(capsys, tmp_path: Path, more: list[str]) -> None:
    name = "model.language_model.layers.27.block_sparse_moe.experts.127.down_proj.weight"
    wide = torch.tensor([1e300, 1e-300, 0.1, torch.inf], dtype=torch.float64)
    save_file({name: wide, "nan": torch.full((2,), torch.nan)}, tmp_path / "a.safetensors")
    code, out, _ = run(capsys, "a.safetensors", "--formats", ",".join(SIGNED), "--per-tensor", *more)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "all NaN" in out and "…" not in out
    for name in SIGNED:
        assert re.search(rf"^{name} +[0-9]", out, flags=re.MULTILINE), name


def marks(out: str) -> dict[str, str]:
    """Octave → the marks after its bar, without blanks."""
    rows = re.finditer(r"^ *(2\^-?\d+) +\S+(?: %)? +[█▏▎▍▌▋▊▉]* *([█▒0>* ]*)$", out, flags=re.M)
    return {row[1]: "".join(row[2].split()) for row in rows}


def test_marks_follow_the_values_where_a_row_holds_several_octaves(capsys, tmp_path: Path) -> None:
    """Rows of two octaves: E4M3 is subnormal below 2**-6, 0 below 2**-10, and ends at 448."""
    exponents = [30, 9, 4, -5, -6, -7, -8, -11, -12, -50]
    save_file({"a": torch.tensor([2.0**exponent for exponent in exponents])}, tmp_path / "a.safetensors")
    code, out, _ = run(capsys, "a.safetensors", "--formats", "fp8_e4m3")
    assert code == 0 and "3 octaves a row" in out and "* mixed" in out
    found = marks(out)
    assert found["2^30"] == ">" and found["2^9"] == ">" and found["2^3"] == "█"
    assert found["2^-6"] == "█"  # −6, −5
    assert found["2^-9"] == "▒"  # −8, −7
    assert found["2^-12"] == "0"  # −12, −11
    assert found["2^15"] == ""
    save_file({"a": torch.tensor([2.0**30, 1.0, 2.0**-5, 2.0**-7, 2.0**-8, 2.0**-50])}, tmp_path / "a.safetensors")
    code, out, _ = run(capsys, "a.safetensors", "--formats", "fp8_e4m3,bf16")
    assert marks(out)["2^-9"] == "▒█"


def test_an_octave_that_a_format_ends_in_is_mixed(capsys, tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0, 448.0, 480.0])}, tmp_path / "a.safetensors")
    assert marks(run(capsys, "a.safetensors", "--formats", "fp8_e4m3,bf16")[1])["2^8"] == "*█"
    save_file({"a": torch.tensor([1.0, 480.0])}, tmp_path / "a.safetensors")
    assert marks(run(capsys, "a.safetensors", "--formats", "fp8_e4m3,bf16")[1])["2^8"] == ">█"


@pytest.mark.parametrize("columns", ["40", "60"])
def test_narrow_terminals_get_what_80_columns_show(capsys, checkpoint: Path, monkeypatch, columns: str) -> None:
    expected = run(capsys, "a.safetensors", "--per-tensor")[1]
    monkeypatch.setenv("COLUMNS", columns)
    assert run(capsys, "a.safetensors", "--per-tensor")[1] == expected


def test_latin_1_shows_bars_and_marks_that_can_be_told_apart(checkpoint: Path) -> None:
    code = "import sys; from bitwright.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *COMMAND, "a.safetensors", "--formats", "fp8_e4m3"]
    environment = {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(Path(formats.__file__).parents[2])}
    shown = subprocess.run(
        command, capture_output=True, encoding="latin-1", env={**os.environ, **environment}, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "# full precision   : subnormal   0 rounds to 0   > too large   * mixed" in shown.stdout
    assert re.search(r"^ *2\^-8 .*# +: *$", shown.stdout, flags=re.MULTILINE)


def test_zeros_alone_are_no_error(capsys, checkpoint: Path) -> None:
    code, out, _ = run(capsys, "a.safetensors", "--tensor", "layer.zeros")
    assert code == 0 and "all 8 finite values are 0" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.safetensors"], "absent.safetensors does not exist"),
        (["empty"], "holds no .safetensors file (it is empty)"),
        (["short.safetensors"], "is damaged or no safetensors file"),
        (["nan.safetensors"], "none of the 4 values is finite (4 NaN, 0 Inf)"),
        (["a.safetensors", "--tensor", "known"], "no tensor is named 'known'"),
        (["a.safetensors", "--tensor", "[[]bold]ids"], "there is no tensor of floats to look at (1 of I64)"),
        (["a.safetensors", "--formats", "fp8_e4m4"], "unknown format 'fp8_e4m4'; did you mean 'fp8_e4m3'?"),
        (["a.safetensors", "--formats", ","], "names no format"),
        (["a.safetensors", "--formats", "mxfp8_e4m3"], "is a block format"),
        (["a.safetensors", "--formats", "bf16,uint4"], "uint4 holds no negative numbers"),
        (["a.safetensors", "--formats", "e8m0", "--scaled"], "name signed formats"),
        (["text.safetensors"], "text.safetensors is no safetensors file: it begins with b'# A read-'"),
        (["void.safetensors"], "'a' has no values"),
        (["/dev/null"], "/dev/null is no regular file"),
        (["nan.safetensors", "--out", "plot.gif"], "name a file that ends in .png or .html"),
        (["nan.safetensors", "--out", ""], "no name was given for the plot; name a file that ends in .png or .html"),
        (["nan.safetensors", "--out", "x"], "'x' has no ending, which tells how to draw; name a file that ends"),
        (["nan.safetensors", "--out", "empty"], "'empty' is a folder; name a file that ends"),
        (["nan.safetensors", "--out", "no/plot.png"], "which is no folder"),
        (["nan.safetensors", "--out", "plot.png"], "none of the 4 values is finite"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_what_cannot_be_shown_is_one_sentence(capsys, checkpoint: Path, arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    Path("short.safetensors").write_bytes(struct.pack("<Q", 1000) + b"{}")
    save_file({"a": torch.full((4,), torch.nan).bfloat16()}, "nan.safetensors")
    save_file({"a": torch.empty(0, 4)}, "void.safetensors")
    Path("text.safetensors").write_text("# A read-me, not tensors.\n")
    before = sorted(path.name for path in Path().iterdir())
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split()) and "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == before
