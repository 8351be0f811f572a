"""`comm explain`: the textbook example as people type it, and data that does not fit."""

from __future__ import annotations

import pytest

from bitwright.cli import main
from bitwright.comms.explain import collective_name, explain, parse_data
from bitwright.errors import CommsError, UnknownName


def test_the_textbook_example(capsys: pytest.CaptureFixture[str]) -> None:
    data = "1,2,3,4;2,4,6,8;3,6,9,12;4,8,12,16"
    assert main(["comm", "explain", "allreduce", "--ranks", "4", "--algorithm", "ring", "--data", data]) == 0
    told = capsys.readouterr().out
    assert "step 6" in told and "step 7" not in told
    assert "0 → 1  [3] = 4  added" in told
    assert "rank 3  10, 20, 30, 40" in told
    assert "24   (busiest: 2(n − 1)/n · S)" in told


def test_a_reduce_scatter_leaves_one_shard_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "explain", "reduce-scatter", "--ranks", "4"]) == 0
    result = capsys.readouterr().out.partition("result")[2]
    assert [f"rank {rank}  {10 * (rank + 1)}\n" in result for rank in range(4)] == [True] * 4


def test_rows_go_on_as_they_began() -> None:
    assert parse_data("1,2;3,5;…", 4).tolist() == [[1, 2], [3, 5], [5, 8], [7, 11]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2;3", "rank 1's row of the data has 1 number and rank 0's has 2"),
        ("1,2;x,3;4,5", "rank 1's row of the data has 'x' where a number is due"),
        ("1;;3", "rank 1's row of the data has '' where a number is due"),
        ("1,2;3,4", "data of 2 rows for 3 ranks"),
        ("1,2;…", "write two"),
    ],
)
def test_data_that_does_not_fit_is_refused(text: str, words: str) -> None:
    with pytest.raises(CommsError, match=words):
        parse_data(text, 3)


@pytest.mark.parametrize("text", ["AllReduce", "all-reduce", "all_reduce"])
def test_collectives_are_called_as_people_write_them(text: str) -> None:
    assert collective_name(text) == "all_reduce"
    with pytest.raises(UnknownName, match="did you mean 'allreduce'"):
        collective_name("allreduc")


def test_bad_input_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "comm",
        "explain",
        "allreduce",
        "--ranks",
        "12",
        "--algorithm",
        "hierarchical",
        "--ranks-per-node",
        "5",
    ]
    assert main(arguments) == 2
    assert "12 ranks do not fill nodes of 5 ranks" in capsys.readouterr().err


def test_what_is_not_a_number_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "explain", "allreduce", "--ranks", "2", "--data", "1,nan;2,3", "--dtype", "bf16"]) == 0
    told = capsys.readouterr().out
    assert "rank 0  3, nan" in told
    assert "the data has NaN" in told


def test_sums_of_rounded_numbers_are_held_against_fp64() -> None:
    from bitwright.comms.wire import wire_format

    found = explain("all_reduce", "ring", 4, [[1 / 3, 2 / 7]] * 4, wire=wire_format("bf16"))
    assert found.relative_error is not None and 0 < found.relative_error < 2**-7
    assert found.bytes_per_element == 2


def test_growth_without_a_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "explain", "allreduce", "--ranks", "2", "--growth"]) == 2
    said = capsys.readouterr()
    assert "--growth tells what rounding on the way does to sums" in said.err and not said.out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["comm", "explain", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["comm", "explain", *arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    return " ".join(said.err.split())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("data", "dtype", "words"),
    [
        ("65000,1;65000,1", "fp16", "a sum is beyond fp16, whose largest number is 65,504; the data are finite"),
        ("1e300,1;1e300,1", "fp32", "the data are finite, but beyond fp32, whose largest number is 3.4e+38"),
        ("70000,1;1,1", "fp16", "the data are finite, but beyond fp16, whose largest number is 65,504"),
        ("3e38,1;3e38,1", "int8", "a sum is beyond int8, whose largest number is 3.4e+38 under its scale"),
        ("inf,1;-inf,1", "bf16", "the data has NaN or ∞, and so has the result"),
        ("1e308,1;1e308,1", "bf16", "the data are finite, but beyond bf16"),
    ],
)
def test_why_a_result_is_not_finite_is_told(
    data: str, dtype: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, "allreduce", "--ranks", "2", "--data", data, "--dtype", dtype)
    assert words in " ".join(said.split())


@pytest.mark.filterwarnings("error")
def test_sums_that_overflow_warn_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "inf" in told(capsys, "allreduce", "--ranks", "2", "--data", "1e308;1e308")
    huge = [[3e38], [3e38]]
    from bitwright.comms.wire import all_reduced, wire_format

    for algorithm in ("ring", "one_shot", "two_shot"):
        assert all_reduced(huge, wire_format("fp32"), algorithm).tolist() == [[float("inf")]] * 2


@pytest.mark.parametrize("ranks", ["129", "2048", "100000"])
@pytest.mark.parametrize("more", [(), ("--data", "1,2;2,4;…")])
def test_more_ranks_than_can_be_followed_are_refused(
    ranks: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "allreduce", "--ranks", ranks, *more)
    assert "128 ranks at most" in said and "bitwright comm time" in said


def test_more_numbers_than_can_be_followed_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    row = ",".join(["1"] * 2000)
    said = refused(capsys, "allreduce", "--ranks", "128", "--data", f"{row};{row};…")
    assert "128 ranks of 2,000 numbers" in said and "give fewer" in said


@pytest.mark.parametrize(
    ("algorithm", "op", "most"), [("tree", "allreduce", "2 segments"), ("ring", "broadcast", "4 segments")]
)
def test_segments_are_no_more_than_the_data_can_be_cut_into(
    algorithm: str, op: str, most: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [op, "--ranks", "4", "--algorithm", algorithm, "--segments"]
    assert f"4 numbers make {most} at most" in refused(capsys, *asked, "1000000000")
    assert "result" in told(capsys, *asked, most[0])
    # The default is what the data have room for.
    assert "result" in told(capsys, op, "--ranks", "2", "--algorithm", algorithm, "--data", "1;2")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("allreduce", "--algorithm", "ring", "--segments", "7"), "all_reduce by ring is no pipeline"),
        (("allreduce", "--segments", "2"), "all_reduce by ring is no pipeline"),
        (("allreduce", "--algorithm", "ring", "--ranks-per-node", "2"), "ring knows no nodes"),
        (("broadcast", "--dtype", "int8", "--growth"), "--growth is of all-reduces, and broadcast"),
        (
            ("allreduce", "--algorithm", "hierarchical", "--dtype", "bf16", "--growth"),
            "--growth has no column of hierarchical",
        ),
        (
            ("allreduce", "--algorithm", "hierarchical", "--ranks-per-node", "8"),
            "4 ranks do not fill nodes of 8 ranks",
        ),
        (("allreduce", "--dtype", "foo"), "unknown format of the wire 'foo'"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    asked: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *asked)
    assert words in said
    assert "fp4" not in said


@pytest.mark.parametrize(
    ("op", "algorithm", "steps"),
    [
        ("allreduce", "ring", "2(n − 1)"),
        ("reducescatter", "ring", "n − 1"),
        ("allgather", "ring", "n − 1"),
        ("broadcast", "ring", "n − 2 + m"),
        ("broadcast", "tree", "⌈log2 (n − 1)⌉ + m"),
        ("reducescatter", "halving_doubling", "⌈log2 n⌉"),
        ("reducescatter", "two_shot", "1"),
    ],
)
def test_the_first_line_has_the_closed_form_of_the_collective(
    op: str, algorithm: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, op, "--ranks", "4", "--algorithm", algorithm)
    first = said.splitlines()[0]
    assert first.endswith(f"; steps: {steps}")
    assert not [word for word in ("2(n − 1)", "2 log2 n", "two steps") if word in first.replace(steps, "")]


def test_a_closed_form_stands_alone_where_it_gives_the_number(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("allreduce", "--ranks", "3", "--data")
    assert "(busiest: 2(n − 1)/n · S)" in told(capsys, *asked, "1,2,3;2,4,6;3,6,9")
    ragged = told(capsys, *asked, "1,2,3,4;2,4,6,8;…")
    assert "(busiest: 2(n − 1)/n · S, for lengths that 3 divides)" in " ".join(ragged.split())
    alone = told(capsys, "broadcast", "--ranks", "1")
    assert "1 rank:" in alone and "one rank has nothing to send" in alone


def test_growth_says_what_it_is_of_and_has_the_algorithm_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitwright.cli.comm_explain._GROWTH", (2, 4))
    said = told(capsys, "allreduce", "--algorithm", "one_shot", "--dtype", "bf16", "--growth")
    assert "relative error of all-reduces in bf16" in said
    head, _, *rows = said.partition("relative error of all-reduces")[2].splitlines()[1:]
    assert head.split() == ["ranks", "ring", "tree", "halving_doubling", "two_shot", "one_shot"]
    assert [len(row.split()) for row in rows[:2]] == [6, 6]


def test_every_algorithm_sums_all_numbers_where_growth_is_measured() -> None:
    from bitwright.comms.collectives import ALGORITHMS, algorithms_of
    from bitwright.comms.wire import error_growth

    names = [name for name in algorithms_of("all_reduce") if not ALGORITHMS[name].needs_nodes]
    assert all(row.relative_error < 1e-6 for row in error_growth(["fp32"], names, [2, 3, 8], length=64))
