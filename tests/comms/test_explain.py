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
        ("1,2;3", "row 1 of the data has 1 numbers and row 0 has 2"),
        ("1,2;x,3;4,5", "row 1 of the data, 'x,3', has no numbers"),
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
