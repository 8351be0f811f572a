"""``bitwright comm fit``: what is refused before anything is fitted, and what a fit says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwright.cli import main
from bitwright.comms import read_topology_file, topology

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def bench_file(path: Path, *, rate: float = 1e-9, times: tuple[float, ...] | None = None) -> Path:
    """Times of four sizes of an all-reduce over four ranks."""
    rows = [
        {"op": "all_reduce", "dtype": "fp32", "algorithm": "ring", "num_ranks": 4, "num_bytes": size, "time_s": time_s}
        | {"num_wrong": 0}
        for size, time_s in zip(SIZES, times or [1e-5 + size * rate for size in SIZES], strict=True)
    ]
    path.write_text(json.dumps({"num_ranks": 4, "backend": "gloo", "rows": rows}), encoding="utf-8")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["comm", "fit", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("error: ")
    return " ".join(said.err.split())


def test_a_file_that_cannot_be_written_is_refused_before_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bench_file(tmp_path / "b.json")
    monkeypatch.setattr("bitwright.cli.comm_fit.fit_bench_files", None)
    assert "does not exist; make it first" in refused(capsys, file, "--out", tmp_path / "no" / "x.toml")
    assert "ends in .toml" in refused(capsys, file, "--out", tmp_path / "x.json")
    assert "nothing is replaced" in refused(capsys, file, "--out", bench_file(tmp_path / "x.toml"))


@pytest.mark.parametrize("name", ["My Cluster", "", "my_cluster", 'a"b', "-a", "a\n"])
def test_a_name_that_no_file_may_have_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, tmp_path / "not-even-there.json", "--name", name)
    assert "small letters, digits, dots and hyphens" in said and "--name this-cluster" in said


def test_what_is_written_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = bench_file(tmp_path / "b.json"), tmp_path / "here.toml"
    assert main(["comm", "fit", str(file), "--name", "lab-2.a", "--out", str(out)]) == 0
    assert f"--cluster-file {out}" in capsys.readouterr().err.replace("\n", "")
    assert read_topology_file(out).name == "lab-2.a"


def test_one_measurement_is_no_two_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bench_file(tmp_path / "b.json")
    assert "is given twice" in refused(capsys, file, file)
    assert "is given twice" in refused(capsys, file, tmp_path / "." / "b.json")
    assert "has the very times of" in refused(capsys, file, bench_file(tmp_path / "copy.json"))


def test_one_size_is_no_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bench_file(tmp_path / "b.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | {"rows": content["rows"][:1]}), encoding="utf-8")
    assert "was measured at 1 size, and a curve needs three" in refused(capsys, file)


def test_levels_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [bench_file(tmp_path / "in.json"), bench_file(tmp_path / "out.json", rate=4e-9)]
    assert main(["comm", "fit", *map(str, files)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("all_reduce by ring: 4 sizes") == 2
    assert "gloo, inside a node: all_reduce" in said and "gloo, between ranks: all_reduce" in said
    assert "warning" not in said


def test_a_curve_that_explains_little_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bench_file(tmp_path / "b.json", times=(1e-3, 1e-5, 1e-2, 1e-3))
    assert main(["comm", "fit", str(file)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: all_reduce by ring is off by more than 15" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "the JSON in it is no object"),
        ("3", "the JSON in it is no object"),
        ('{"rows": 3}', "num_ranks: field required"),
    ],
)
def test_a_file_of_another_kind_is_refused_in_words(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.json").write_text(content, encoding="utf-8")
    said = refused(capsys, tmp_path / "b.json")
    assert words in said and "instance of" not in said


def test_counts_beyond_the_levels_are_refused_in_words(tmp_path: Path) -> None:
    file, out = bench_file(tmp_path / "b.json"), tmp_path / "here.toml"
    assert main(["comm", "fit", str(file), "--out", str(out)]) == 0
    with pytest.raises(Exception, match="give 1 count at most"):
        topology(f"{out}x2x2")
