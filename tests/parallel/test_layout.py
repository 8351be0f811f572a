"""Layouts: sizes, groups, and everything that cannot be."""

from __future__ import annotations

import pytest

from bitwright.errors import ParallelError
from bitwright.hardware import KNOWN_MODELS
from bitwright.parallel.layout import Layout, why_not

LLAMA = KNOWN_MODELS.get("llama-3-70b").shape
MIXTRAL = KNOWN_MODELS.get("mixtral-8x7b").shape


def test_gpus_are_numbered_with_tp_innermost_and_pp_outermost() -> None:
    layout = Layout(dp=4, tp=8, cp=2, pp=3)
    assert layout.num_gpus == 192
    assert [layout.stride(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 8, 16, 64]  # type: ignore[arg-type]


def test_micro_batches() -> None:
    assert Layout(dp=4, micro_batch=2).num_micro_batches(64) == 8
    with pytest.raises(
        ParallelError, match=r"66 sequences is not divided by dp 4 × micro-batch 2; give a multiple of 8"
    ):
        Layout(dp=4, micro_batch=2).num_micro_batches(66)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"zero": 4}, "zero is 4"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"schedule": "2f2b"}, "schedule is '2f2b'"),
        ({"dp": 8, "zero_group": 3}, "zero_group 3 does not divide dp 8"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, object], text: str) -> None:
    with pytest.raises(ParallelError, match=text):
        Layout(**sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(dp=3, tp=8), "is 24 GPUs, and there are 32"),
        (Layout(dp=2, tp=8, pp=2, interleave=42), "80 layers are fewer than 2 stages of 42 chunks"),
        (Layout(dp=1, tp=4, pp=8, zero=2), "zero 2 with a pipeline"),
        (Layout(dp=32, micro_batch=3), "does not divide 64 sequences"),
        (Layout(dp=8, tp=1, pp=4, interleave=2, micro_batch=4), "2 micro-batches are no multiple of 4 stages"),
        (Layout(dp=4, tp=8, ep=2), "ep 2 does not divide 1 experts"),
    ],
)
def test_what_cannot_be_says_why(layout: Layout, text: str) -> None:
    reason = why_not(layout, LLAMA, sequence=4096, num_gpus=32, global_batch=64)
    assert reason is not None
    assert text in reason


def test_heads_are_not_cut() -> None:
    reason = why_not(Layout(tp=3), LLAMA, sequence=4096, num_gpus=3, global_batch=64)
    assert reason == "tp 3 does not divide 64 heads and 8 key–value heads"


def test_experts_are_dealt_out_over_data_parallel_gpus() -> None:
    assert why_not(Layout(dp=8, ep=8), MIXTRAL, sequence=4096, num_gpus=8, global_batch=8) is None
    reason = why_not(Layout(dp=4, tp=2, ep=8), MIXTRAL, sequence=4096, num_gpus=8, global_batch=8)
    assert reason is not None and "ep 8 does not divide the dp × cp = 4 GPUs" in reason


def test_a_layout_reads_as_one_writes_it() -> None:
    assert str(Layout(dp=8, tp=4, pp=2, zero=1, interleave=2, recompute="full")) == (
        "dp8 tp4 pp2 zero1 mb1 v2 recompute-full"
    )
