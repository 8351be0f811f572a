"""``bitwright hardware``: list, show and profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitwright import hardware
from bitwright.cli import main
from bitwright.hardware import bench, profile


def test_the_list_names_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware"]) == 0
    alone = capsys.readouterr().out
    assert main(["hardware", "list"]) == 0
    assert capsys.readouterr().out == alone
    assert all(name in alone for name in hardware.names())
    assert "this machine: " in alone


def test_a_device_is_shown_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "show", "H100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fp8_e4m3 1978.9" in out and "3350 GB/s" in out
    assert "sums keep 14 significant bits (read: DeepSeek-V3" in out
    assert "link NVLink4 450 GB/s one way" in out


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "show", "h1000"]) == 2
    assert "did you mean 'h100'?" in capsys.readouterr().err
    assert main(["hardware", "show", "nowhere.toml"]) == 2
    assert "'nowhere.toml' cannot be read" in capsys.readouterr().err


def test_a_profile_is_written_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    effort = bench.Effort(shapes=((64, 64, 64),), streamed_bytes=2**16, slice_s=0.001)
    monkeypatch.setattr(profile, "_effort", lambda *, gpu, quick: effort)
    monkeypatch.setattr(bench, "MATVEC", (256, 128))
    out = tmp_path / "here.toml"
    assert main(["hardware", "profile", "--quick", "--out", str(out), "--name", "lab"]) == 0
    assert f"wrote {out}" in capsys.readouterr().err.replace("\n", "")
    assert hardware.read_device_file(out).name == "lab"
    assert main(["hardware", "show", str(out)]) == 0
    assert "matmul fp32 64 x 64 x 64" in capsys.readouterr().out
    assert main(["hardware", "profile", "--out", str(out)]) == 2
    assert "exists, and a profile replaces nothing" in capsys.readouterr().err
    assert main(["hardware", "profile", "--out", str(tmp_path / "a.json")]) == 2
    assert main(["hardware", "profile", "--out", str(tmp_path / "no" / "a.toml")]) == 2
    assert main(["hardware", "profile", "--quick"]) == 0
    assert capsys.readouterr().out.startswith('name = "this-machine"')
