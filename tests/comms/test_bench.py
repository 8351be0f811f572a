"""`comm bench` between processes: columns, wrong numbers, peers that differ, hang or die; `comm fit` of its file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bitwright.cli import main
from bitwright.comms import collective_time, read_topology_file
from bitwright.comms.bench import BenchSettings, parse_sizes
from bitwright.errors import CommsError, UnknownName

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
COMMAND = "import sys; from bitwright.cli import main; sys.exit(main(sys.argv[1:]))"


def start(*arguments: list[str]) -> list[subprocess.Popen[str]]:
    """One process for each list of arguments, as torchrun starts them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(len(arguments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "comm", "bench", *own],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(arguments)
    ]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_times_and_their_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    own = ["--op", "allreduce,alltoall", "--sizes", "1KiB..256KiB", "--algorithm", "library,ring,pairwise"]
    first, second = start([*own, "--out", str(file)], own)
    code, out, err = finish(first)
    assert (code, finish(second)[0]) == (0, 0), err
    lines = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert lines[0] == ["size", "count", "type", "operation", "algorithm", "time", "algbw", "busbw", "#wrong"]
    assert {line[-1] for line in lines[2:]} == {"0"}
    told = json.loads(file.read_text(encoding="utf-8"))
    for row in told["rows"]:
        assert row["algbw_gb_per_s"] == pytest.approx(row["num_bytes"] / row["time_s"] / 1e9)
        factor = 1.0 if row["op"] == "all_reduce" else 0.5  # of two ranks
        assert row["busbw_gb_per_s"] == pytest.approx(factor * row["algbw_gb_per_s"])
    topology = tmp_path / "here.toml"
    assert main(["comm", "fit", str(file), "--out", str(topology), "--name", "here"]) == 0
    assert "all_reduce by ring" in capsys.readouterr().err
    fitted = read_topology_file(topology)
    assert fitted.num_ranks == 2 and "mean error" in fitted.notes[0]
    largest = max((r for r in told["rows"] if r["algorithm"] == "pairwise"), key=lambda row: row["num_bytes"])
    predicted = collective_time("all_to_all", largest["num_bytes"], fitted, "pairwise").time_s
    # Within what a busy machine does to a few milliseconds.
    assert 0.2 < predicted / largest["time_s"] < 5


def test_ranks_that_were_asked_for_different_types_are_named() -> None:
    first, second = start(["--sizes", "1KiB", "--dtype", "bf16"], ["--sizes", "1KiB", "--dtype", "fp32"])
    code, _, err = finish(first)
    assert code == finish(second)[0] == 2
    assert "rank 1 has dtypes fp32 where rank 0 has bf16" in err


def test_nan_counts_as_wrong() -> None:
    first, second = start(*[["--sizes", "64B", "--algorithm", "library", "--nan-rank", "1"]] * 2)
    code, out, _ = finish(first)
    assert code == 1
    # One number of the sum, on both ranks.
    assert out.splitlines()[-2].split()[-1] == "2"
    assert "# 2 wrong numbers" in out
    assert finish(second)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("fate", "words"), [(signal.SIGSTOP, "no sign of life"), (signal.SIGKILL, "no sign of life")])
def test_a_peer_that_hangs_or_dies_is_named_and_nobody_is_left(fate: signal.Signals, words: str) -> None:
    own = ["--sizes", "64B..64MiB", "--factor", "2", "--algorithm", "ring", "--timeout", "6"]
    first, second, third = start(own, own, own)
    assert first.stdout is not None
    for _ in range(4):  # the head, and a first row
        first.stdout.readline()
    second.send_signal(fate)
    begun = time.monotonic()
    codes = {}
    for name, process in (("first", first), ("third", third)):
        codes[name], _, err = finish(process)
        assert f"rank 1 gave {words}" in err
    assert codes == {"first": 2, "third": 2}
    assert time.monotonic() - begun < 30
    second.send_signal(signal.SIGKILL)
    assert finish(second)[0] == -signal.SIGKILL


def test_without_torchrun_the_way_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from bitwright.comms.peers import Peers

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CommsError, match="start it with: torchrun --nproc-per-node N --no-python bitwright comm bench"):
        Peers(backend="gloo", timeout_s=1)


def test_a_backend_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitwright.comms.peers import Peers

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UnknownName, match="unknown backend 'gloom'; did you mean 'gloo'"):
        Peers(backend="gloom", timeout_s=1)


def test_sizes_are_spelled() -> None:
    assert parse_sizes("8B..1KiB") == (8, 32, 128, 512, 1024)
    assert parse_sizes("1KiB, 3MiB") == (1024, 3 * MIB)
    for text, words in (("1MiB..8B", "go down"), ("big", "'big' cannot be read"), ("0B", "cannot be read")):
        with pytest.raises(CommsError, match=words):
            parse_sizes(text)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(CommsError, match="'pairwise' does no all_reduce"):
        BenchSettings(ops=("all_reduce",), sizes=(8,), dtypes=("fp32",), algorithms=("pairwise",))
    settings = BenchSettings(
        ops=("all_reduce", "all_to_all"), sizes=(8,), dtypes=("fp8_e4m3",), algorithms=("library", "ring", "pairwise")
    )
    assert [job[:3] for job in settings.jobs()] == [
        ("all_reduce", "fp8_e4m3", "ring"),
        ("all_to_all", "fp8_e4m3", "pairwise"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is no JSON"), ('{"num_ranks": 2, "backend": "gloo", "rows": []}', "rows"), ("{}", "num_ranks")],
)
def test_a_file_that_bench_did_not_write_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text, encoding="utf-8")
    assert main(["comm", "fit", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_wrong_numbers_are_not_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"op": "all_reduce", "algorithm": "ring", "num_ranks": 2, "num_bytes": 8, "time_s": 1.0, "num_wrong": 1}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"num_ranks": 2, "backend": "gloo", "rows": [row]}), encoding="utf-8")
    assert main(["comm", "fit", str(path)]) == 2
    assert "has 1 wrong numbers" in capsys.readouterr().err
