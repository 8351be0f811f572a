"""Memory of layouts: papers' closed forms, published runs, and runs that ran out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.hardware.memory import StateBits
from bitwright.hardware.model_shape import shape_from_sizes
from bitwright.parallel.layout import Layout
from bitwright.parallel.memory import MemoryFacts, layout_memory

from .conftest import MakeJob

GIB = 2**30


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200):  # type: ignore[no-untyped-def]
    return shape_from_sizes(
        name="gpt",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads,
        vocab_size=vocab,
        is_gated=False,
        norm="layer",
        biases="all",
        is_head_tied=True,
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_are_those_of_the_zero_paper(make_job: MakeJob, zero: int) -> None:
    # Rajbhandari et al., arXiv:1910.02054, figure 1: 2 + 2 + 12 bytes with Adam, d = 8.
    per_parameter = {0: 16, 1: 4 + 12 / 8, 2: 2 + 14 / 8, 3: 16 / 8}[zero]
    facts = MemoryFacts(states=StateBits(parameters=16, gradients=16, masters=32, moments=64))
    job = make_job(dp=8, zero=zero)
    found = layout_memory(job, facts)
    assert found.states == pytest.approx(per_parameter * job.shape.num_parameters)
    assert (found.gathered > 0) == (zero == 3)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_activations_are_those_of_korthikanti(
    make_job: MakeJob, tp: int, sequence_parallel: bool, recompute: str
) -> None:
    # arXiv:2205.05198, equations 1, 2 and 4, and table 2; s 2048, b 1.
    layers, h, a, s = 48, 6144, 64, 2048
    scores = 5 * a * s / h if recompute == "none" else 0
    per_layer = 34 / tp + scores / tp if sequence_parallel else 10 + 24 / tp + scores / tp
    job = replace(
        make_job(sequence=s, global_batch=8 // tp),
        shape=gpt(layers, h, a),
        layout=Layout(tp=tp, dp=8 // tp, recompute=recompute, is_sequence_parallel=sequence_parallel),  # type: ignore[arg-type]
    )
    found = layout_memory(job, MemoryFacts(attention="stored", dropout_bits=8))
    assert found.activations == pytest.approx(layers * s * h * per_layer, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "gib"),
    # The same paper, figure 1: parameters and optimizer states of a GPU.
    [(48, 6144, 64, 1, 45.5625), (96, 12288, 96, 8, 45.5625), (105, 20480, 128, 35, 31.640625)],
)
def test_states_of_megatron(make_job: MakeJob, layers: int, hidden: int, heads: int, pp: int, gib: float) -> None:
    job = replace(
        make_job(cluster=f"a100x8x{pp}", policy="fp16-mixed", sequence=2048, global_batch=pp),
        shape=gpt(layers, hidden, heads),
        layout=Layout(tp=8, pp=pp),
    )
    facts = MemoryFacts(states=StateBits(parameters=16, gradients=32, masters=32, moments=64))
    assert layout_memory(job, facts).states / GIB == pytest.approx(gib, rel=0.09)


def test_runs_of_bloom_that_fitted_and_that_did_not(make_job: MakeJob) -> None:
    # bigscience chronicles-prequel.md: 72 layers of 14,336, 384 A100 of 80 GB; GB as nvidia-smi told.
    facts = MemoryFacts(
        states=StateBits(parameters=16, masters=32, gradients=16, moments=64), attention="stored", dropout_bits=8
    )

    def total(tp: int, pp: int, micro: int) -> float:
        job = replace(
            make_job(cluster="a100x8x48", policy="fp16-mixed", sequence=2048),
            shape=gpt(72, 14336, 64, vocab=250000),
            global_batch=2048,
            layout=Layout(dp=384 // tp // pp, tp=tp, pp=pp, zero=1, micro_batch=micro, recompute="full"),
        )
        return layout_memory(job, facts, around_bytes=12e9).total / 1e9

    assert total(8, 12, 2) == pytest.approx(37, rel=0.1)
    assert total(4, 12, 2) == pytest.approx(44, rel=0.1)
    assert total(2, 12, 2) == pytest.approx(63, rel=0.1)
    assert total(2, 6, 2) > 80 and total(2, 6, 1) > 80


def test_pipelines_hold_micro_batches_in_flight(make_job: MakeJob) -> None:
    def activations(**layout: object) -> float:
        return layout_memory(make_job(pp=8, **layout)).activations

    plain = activations()
    assert activations(schedule="gpipe") == pytest.approx(8 * plain)
    assert activations(interleave=2) == pytest.approx((1 + 7 / 16) * plain)
    assert activations(recompute="full") < activations(recompute="operations") < plain


def test_experts_are_divided(make_job: MakeJob) -> None:
    whole, dealt = (layout_memory(make_job("mixtral-8x7b", dp=8, ep=ep)).states for ep in (1, 8))
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole - dealt == pytest.approx(experts * (1 - 1 / 8) * 18, rel=0.01)
