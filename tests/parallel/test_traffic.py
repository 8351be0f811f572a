"""Bytes of a step, by hand and by the formulas of the papers; and the sentence that is made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.parallel.advice import reason_of
from bitwright.parallel.layout import Layout
from bitwright.parallel.step_time import shard_parameters, step_time
from bitwright.parallel.traffic import sent_bytes

from .conftest import MakeJob

HIDDEN, LAYERS = 4096, 32  # of Llama 3 8B


def test_tensor_parallel_by_hand(make_job: MakeJob) -> None:
    job = make_job(dp=2, tp=4, micro_batch=2, global_batch=16)
    one = 2 * 4096 * HIDDEN * 2  # a micro-batch's activations in bf16
    # 4 all-reduces a layer, ring's bytes; 4 micro-batches.
    assert sent_bytes(job)["tp"] == pytest.approx(4 * LAYERS * 4 * 2 * 3 / 4 * one)
    gathered = replace(job, layout=replace(job.layout, is_sequence_parallel=True))
    assert sent_bytes(gathered)["tp"] == pytest.approx(4 * LAYERS * (4 * 2 + 2) * 3 / 4 * one)
    again = replace(job, layout=replace(job.layout, recompute="full"))
    assert sent_bytes(again)["tp"] == pytest.approx(1.5 * sent_bytes(job)["tp"])


def test_data_parallel_is_two_or_three_times_the_parameters(make_job: MakeJob) -> None:
    job = make_job(dp=8, global_batch=8)
    numerics = replace(job.numerics, gradient_bits=16.0, parameter_bits=16.0)
    parameters = sum(shard_parameters(job))

    def sent(zero: int, micro_batches: int = 1) -> float:
        changed = replace(job, numerics=numerics, global_batch=8 * micro_batches, layout=Layout(dp=8, zero=zero))
        return sent_bytes(changed)["dp"] / (2 * parameters * 7 / 8)

    # Rajbhandari et al., arXiv:1910.02054, section 7: 2 for the baseline and ZeRO 1 and 2, 3 for ZeRO 3.
    assert [sent(zero) for zero in (0, 1, 2, 3)] == pytest.approx([2, 2, 2, 3])
    assert [sent(zero, 4) for zero in (0, 1, 2, 3)] == pytest.approx([2, 2, 5, 12])


def test_stages_pass_on_activations_and_gradients(make_job: MakeJob) -> None:
    sent = sent_bytes(make_job(pp=8, interleave=2, global_batch=16))
    assert sent == {"pp": pytest.approx(2 * 2 * 16 * 4096 * HIDDEN * 2)}


def test_reasons_tell_what_lies_on_the_critical_path_and_what_hides(make_job: MakeJob) -> None:
    job = make_job("llama-3-70b", "h100x8x8", global_batch=256, dp=4, tp=8, pp=2, zero=1, is_sequence_parallel=True)
    said = reason_of(job, step_time(job))
    # 64 micro-batches of 40 layers, ten gathers or scatters of 7/8 of 64 MiB each: 1,400 GiB.
    assert sent_bytes(job)["tp"] == pytest.approx(1400 * 2**30)
    assert "tp within a node: 1.37 TiB on the critical path, " in said
    assert "gradients across nodes: " in said and "of its time behind the backward pass" in said
    assert "pp across nodes: " in said and "bubble" in said
    alone = make_job("llama-3.2-1b", "h100x8")
    assert reason_of(alone, step_time(alone)) == "one GPU: nothing is exchanged"
