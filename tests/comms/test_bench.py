"""`comm bench` between processes: columns, wrong numbers, peers that differ, hang or die; `comm fit` of its file."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bitwright.cli import main
from bitwright.comms import collective_time, read_topology_file
from bitwright.comms.bench import BenchSettings
from bitwright.comms.sizes import parse_sizes
from bitwright.errors import CommsError, UnknownName

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
COMMAND = "import sys; from bitwright.cli import main; sys.exit(main(sys.argv[1:]))"


def start(*arguments: list[str], ranks: Sequence[int] = (), world: int | None = None) -> list[subprocess.Popen[str]]:
    """One process for each list of arguments, as torchrun starts them; ranks and how many there are may be others."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": str(world or len(arguments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "comm", "bench", *own],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # who starts the tests in the background of a script has them, and what they start, ignore interrupts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        for rank, own in zip(ranks or range(len(arguments)), arguments, strict=True)
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
    # 5 sizes of each: the library's for what our ring does too.
    assert {len(curve.residuals) for curve in fitted.levels[0].curves} == {5}
    largest = max(
        (r for r in told["rows"] if (r["op"], r["algorithm"]) == ("all_to_all", "library")),
        key=lambda row: row["num_bytes"],
    )
    predicted = collective_time("all_to_all", largest["num_bytes"], fitted, "pairwise").time_s
    # Within what a busy machine does to a few milliseconds.
    assert 0.2 < predicted / largest["time_s"] < 5


def test_ranks_that_were_asked_for_different_types_are_named() -> None:
    first, second = start(["--sizes", "1KiB", "--dtype", "bf16"], ["--sizes", "1KiB", "--dtype", "fp32"])
    code, _, err = finish(first)
    assert code == finish(second)[0] == 2
    assert "rank 1 has dtypes fp32 where rank 0 has bf16" in err


def test_nan_counts_as_wrong() -> None:
    own = ["--sizes", "64B", "--algorithm", "library,ring", "--dtype", "fp32,int8", "--nan-rank", "1"]
    first, second = start(own, own)
    code, out, _ = finish(first)
    assert code == 1
    rows = [line.split() for line in out.splitlines() if line.split()[0] == "64"]
    # One number of the sum on both ranks; under a scale all 64 of its block.
    assert [(row[2], row[4], row[-1]) for row in rows] == [
        ("fp32", "library", "2"),
        ("fp32", "ring", "2"),
        ("int8", "ring", "128"),
    ]
    assert "# 132 wrong numbers" in out
    assert finish(second)[0] == 0


LONG_TIMEOUT_S = 6
LONG = ["--sizes", "64B..64MiB", "--factor", "2", "--algorithm", "ring", "--timeout", str(LONG_TIMEOUT_S)]


def wait_for_a_row(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while not process.stdout.readline().strip().startswith("64 "):
        assert process.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_hangs_or_dies_is_named_and_nobody_is_left(victim: int, fate: signal.Signals) -> None:
    processes = start(LONG, LONG, LONG)
    wait_for_a_row(processes[0])
    processes[victim].send_signal(fate)
    begun = time.monotonic()
    words = f"rank {victim} gave no sign of life" if victim else "rank 0, which keeps the store, does not answer"
    for rank, process in enumerate(processes):
        if rank != victim:
            code, _, err = finish(process)
            assert code == 2
            assert words in err
            if victim:
                silent = re.search(r"no sign of life for (\d+) s", err)
                # Since it was stopped: until the timeout of a message, and the look at its beats after that.
                assert silent is not None
                assert 1 <= int(silent[1]) <= time.monotonic() - begun + 1
                assert fate == signal.SIGKILL or int(silent[1]) >= LONG_TIMEOUT_S
    assert time.monotonic() - begun < 60
    processes[victim].send_signal(signal.SIGKILL)
    assert finish(processes[victim])[0] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("fate", [signal.SIGINT, signal.SIGKILL])
def test_an_end_leaves_no_traces_of_the_backend(fate: signal.Signals) -> None:
    processes = start(LONG, LONG)
    wait_for_a_row(processes[0])
    processes[0].send_signal(fate)
    ended, _, said = finish(processes[0])
    code, _, err = finish(processes[1])
    assert ended == (130 if fate == signal.SIGINT else -fate)
    assert said == ("interrupted\n" if fate == signal.SIGINT else "")
    assert code == 2 and "rank 0, which keeps the store" in err
    assert "frame #" not in err and len(err.splitlines()) <= 3


@pytest.mark.parametrize(
    ("fate", "written", "words"),
    [
        ("stopped", ["1.00", "9.25"], "rank 0 gave no sign of life for 8 s"),
        ("never came", [None, "9.25"], "rank 0 gave no sign of life for 9 s"),
    ],
)
def test_silence_is_as_long_as_it_was(
    fate: str, written: list[str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitwright.comms import peers

    class Store:
        """Rank 1's view: its own beats go on, rank 0's do not."""

        def check(self, keys: list[str]) -> bool:
            return keys[0].startswith("beat/") and written[int(keys[0][5:])] is not None

        def get(self, key: str) -> bytes:
            return str(written[int(key[5:])]).encode()

    monkeypatch.setattr(peers, "_GONE_AFTER_S", 0.01)
    here = peers.Peers.__new__(peers.Peers)
    here.rank, here.size, here._step = 1, 2, 1
    here._store = Store()  # type: ignore[assignment]
    here._beats_since = time.monotonic() - 9.25
    assert words in here._read_culprit(6.0), fate


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "words"),
    [((0, 1), "rank 2 did not come within 12 s to start"), ((1, 2), "rank 0 does not answer at 127.0.0.1")],
)
def test_a_rank_that_does_not_come_is_named(there: tuple[int, int], words: str) -> None:
    own = ["--sizes", "64B", "--timeout", "12"]
    for process in start(own, own, ranks=there, world=3):
        code, _, err = finish(process)
        assert code == 2
        assert words in err


@pytest.mark.slow
def test_under_torchrun_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    """The store is kept by torchrun's agent there, and it is the agent that sees who has died."""
    script = tmp_path / "bitwright"
    script.write_text(f"#!{sys.executable}\n{COMMAND}\n", encoding="utf-8")
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    agent = subprocess.Popen(
        [*torchrun, str(script), "comm", "bench", *LONG],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_a_row(agent)
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text(encoding="ascii").split()
    ranks = {rank_of(int(child)): int(child) for child in children}
    os.kill(ranks["1"], signal.SIGKILL)
    code, _, err = finish(agent)
    assert code == 1
    assert "rank      : 1" in err and "Signal 9" in err
    assert not [child for child in ranks.values() if Path(f"/proc/{child}").exists()]


def rank_of(process: int) -> str:
    """RANK in a process's environment; "" where it has none."""
    written = Path(f"/proc/{process}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    return next((line.partition("=")[2] for line in written if line.startswith("RANK=")), "")


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


def settings(ops: str, dtypes: str, algorithms: str = "", **more: int) -> BenchSettings:
    names = [tuple(text.split(",")) if text else () for text in (ops, dtypes, algorithms)]
    return BenchSettings(ops=names[0], sizes=(8,), dtypes=names[1], algorithms=names[2], **more)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("all_reduce", "fp32", "pairwise"), "'pairwise' does no all_reduce"),
        # With several collectives too.
        (("all_reduce,all_to_all", "fp32", "rnig"), "unknown algorithm 'rnig'; did you mean 'ring'"),
        (("all_reduce,broadcast", "fp32", "ring,pairwise"), "'pairwise' does no all_reduce or broadcast"),
        (
            ("all_reduce", "fp8_e4m3", "library"),
            "nothing to measure: all_reduce in fp8_e4m3 by library: the backend's own",
        ),
        (("all_reduce", "fp32", "hierarchical"), "how many ranks each has"),
    ],
)
def test_what_cannot_run_is_refused(asked: tuple[str, str, str], words: str) -> None:
    with pytest.raises((CommsError, UnknownName), match=words):
        settings(*asked)


def test_nodes_that_nobody_asks_for_are_refused() -> None:
    with pytest.raises(CommsError, match="2 ranks a node change nothing"):
        settings("all_reduce", "fp32", "ring", ranks_per_node=2)


def test_a_factor_of_sizes_that_are_no_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", "--sizes", "1KiB,2KiB", "--factor", "2"]) == 2
    assert "--factor 2 changes nothing" in " ".join(capsys.readouterr().err.split())


def test_what_does_not_go_together_is_told_with_its_reason() -> None:
    found = settings("all_reduce,all_to_all", "fp8_e4m3,fp32", "library,ring,pairwise")
    assert found.groups() == (
        ("all_reduce", "fp8_e4m3", "ring"),
        ("all_reduce", "fp32", "library"),
        ("all_reduce", "fp32", "ring"),
        ("all_to_all", "fp8_e4m3", "pairwise"),
        ("all_to_all", "fp32", "library"),
        ("all_to_all", "fp32", "pairwise"),
    )
    told = {item.what: item.reason for item in found.left_out()}
    # 2 collectives × 2 types × 3 algorithms
    assert len(found.groups()) + len(told) == 12
    assert "know fp32, bf16, fp16 only" in told["all_to_all in fp8_e4m3 by library"]
    assert told["all_reduce in fp32 by pairwise"] == "'pairwise' does no all_reduce"


def test_types_that_the_backend_does_not_add_travel_by_a_schedule_and_that_is_told() -> None:
    found = settings("all_reduce,all_to_all", "bf16,fp8_e4m3")
    assert [group[1:] for group in found.groups()] == [
        ("bf16", "library"),
        ("fp8_e4m3", "ring"),
        ("bf16", "library"),
        ("fp8_e4m3", "pairwise"),
    ]
    assert [item.reason.split("; ")[1] for item in found.left_out()] == [
        "measured by ring instead",
        "measured by pairwise instead",
    ]


def test_sizes_that_are_too_small_are_told_and_nothing_measured_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    own = ["--op", "all_reduce,all_gather", "--sizes", "4B,64B", "--dtype", "fp32,fp8_e4m3", "--out", str(file)]
    first, second = start(own, own)
    code, out, err = finish(first)
    assert (code, finish(second)[0]) == (0, 0), err
    told = json.loads(file.read_text(encoding="utf-8"))
    # 4 bytes are one number of fp32, which both ranks can add up but not share out, and four of fp8.
    assert [(row["dtype"], row["num_bytes"], row["algorithm"]) for row in told["rows"]] == [
        ("fp32", 4, "library"),
        ("fp32", 64, "library"),
        ("fp8_e4m3", 4, "ring"),
        ("fp8_e4m3", 64, "ring"),
        ("fp32", 64, "library"),
        ("fp8_e4m3", 4, "ring"),
        ("fp8_e4m3", 64, "ring"),
    ]
    assert {row["num_wrong"] for row in told["rows"]} == {0}
    lines = [line for line in out.splitlines() if line.startswith("# left out: ")]
    assert lines == [f"# left out: {item['what']}: {item['reason']}" for item in told["left_out"]]
    assert "all_gather in fp32 by library, 4 bytes: they do not make a number for each of 2 ranks" in lines[-1]
    small = ["--op", "all_gather", "--sizes", "4B"]
    first, second = start(small, small)
    code, _, err = finish(first)
    assert (code, finish(second)[0]) == (2, 2)
    assert "nothing was measured: all_gather in fp32 by library, 4 bytes" in err


def test_sizes_that_memory_does_not_hold_are_told(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    own = ["--op", "all_reduce", "--sizes", "64B,512GiB", "--out", str(file)]
    first, second = start(own, own)
    code, _, err = finish(first)
    assert (code, finish(second)[0]) == (0, 0), err
    told = json.loads(file.read_text(encoding="utf-8"))
    assert [row["num_bytes"] for row in told["rows"]] == [64]
    assert told["left_out"][0]["what"] == f"all_reduce in fp32 by library, {512 << 30} bytes"
    # 2 ranks, 12 copies of 512 GiB each.
    assert re.search(
        r"the 2 ranks of a machine take about 12,288\.00 GiB .* and [\d.]+ GiB are available",
        told["left_out"][0]["reason"],
    )
    large = ["--sizes", "512GiB"]
    first, second = start(large, large)
    code, _, err = finish(first)
    assert (code, finish(second)[0]) == (2, 2)
    assert "nothing was measured: all_reduce in fp32 by library" in err and "give other sizes" in err


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
    row = {
        "op": "all_reduce",
        "dtype": "fp32",
        "algorithm": "ring",
        "num_ranks": 2,
        "num_bytes": 8,
        "time_s": 1.0,
        "num_wrong": 1,
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"num_ranks": 2, "backend": "gloo", "rows": [row]}), encoding="utf-8")
    assert main(["comm", "fit", str(path)]) == 2
    assert "has 1 wrong number in" in capsys.readouterr().err


def bench_file(folder: Path, name: str, **rows: float) -> Path:
    """Times of four sizes by algorithm_dtype: so many seconds a byte, and 10 µs."""
    told = [
        {"op": "all_reduce", "dtype": dtype, "algorithm": algorithm, "num_ranks": 4, "num_bytes": size}
        | {"time_s": 1e-5 + size * rate, "num_wrong": 0}
        for spelled, rate in rows.items()
        for algorithm, dtype in [spelled.split("__")]
        for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22)
    ]
    path = folder / name
    path.write_text(json.dumps({"num_ranks": 4, "backend": "gloo", "rows": told}), encoding="utf-8")
    return path


def test_one_type_of_numbers_makes_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench_file(tmp_path, "both.json", ring__fp32=1e-9, ring__bf16=4e-9)
    assert main(["comm", "fit", str(path)]) == 2
    assert "times of fp32, bf16 do not make one curve; choose one: --dtype fp32" in capsys.readouterr().err
    rates = {}
    for dtype in ("fp32", "bf16"):
        out = tmp_path / f"{dtype}.toml"
        assert main(["comm", "fit", str(path), "--dtype", dtype, "--out", str(out)]) == 0
        fitted = read_topology_file(out)
        assert f"4 measured times of {dtype}" in fitted.notes[0]
        rates[dtype] = fitted.levels[0].curves[0].ceiling_gb_per_s
    # A ring of 4 sends 1.5 bytes for each.
    assert rates == {"fp32": pytest.approx(1.5, rel=0.1), "bf16": pytest.approx(0.375, rel=0.1)}
    assert main(["comm", "fit", str(path), "--dtype", "fp16"]) == 2
    assert "has no times of fp16; measured in all files: fp32, bf16" in capsys.readouterr().err


def test_what_the_fit_leaves_unexplained_stands_in_the_file(tmp_path: Path) -> None:
    path = bench_file(tmp_path, "bench.json", ring__fp32=1e-9, two_shot__fp32=2e-9)
    out = tmp_path / "here.toml"
    assert main(["comm", "fit", str(path), "--out", str(out)]) == 0
    fitted = read_topology_file(out)
    for curve in fitted.levels[0].curves:
        assert [size for size, _ in curve.residuals] == [1 << 10, 1 << 14, 1 << 18, 1 << 22]
        for size, error in curve.residuals:
            truth = 1e-5 + size * {"ring": 1e-9, "two_shot": 2e-9}[curve.algorithm]
            assert collective_time("all_reduce", size, fitted, curve.algorithm).time_s == pytest.approx(
                truth * (1 + error), rel=1e-3
            )


def test_two_levels_in_one_time_are_left_out_of_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench_file(tmp_path, "bench.json", ring__fp32=1e-9, hierarchical__fp32=2e-9)
    out = tmp_path / "here.toml"
    assert main(["comm", "fit", str(path), "--out", str(out)]) == 0
    assert "hierarchical crosses two levels" in capsys.readouterr().err
    fitted = read_topology_file(out)
    assert [curve.algorithm for curve in fitted.levels[0].curves] == ["ring"]
    assert "left out" in fitted.notes[1]
