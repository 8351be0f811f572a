"""Step times: published runs without calibration, parts that add up, and what each axis costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwright.hardware.model_shape import shape_from_sizes
from bitwright.parallel.job import Job, Software
from bitwright.parallel.layer_time import forward_time, layer_products
from bitwright.parallel.layout import Layout
from bitwright.parallel.step_time import active_linear_weights, bubble_share, stage_layers, step_time

from .conftest import MakeJob


def gpt(name: str, layers: int, hidden: int, heads: int):  # type: ignore[no-untyped-def]
    return shape_from_sizes(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads,
        vocab_size=51200,
        is_gated=False,
        norm="layer",
        biases="all",
        is_head_tied=True,
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "v", "recompute", "seconds"),
    [
        # Korthikanti et al., arXiv:2205.05198, table 5: A100, tp 8, dp 1, micro-batch 1, sequence 2048.
        (96, 12288, 96, 8, 3, "selective", 13.75),
        (105, 20480, 128, 35, 3, "full", 49.05),
        (128, 25600, 160, 64, 1, "full", 94.42),
    ],
)
def test_megatron_on_a100_without_calibration(
    make_job: MakeJob, layers: int, hidden: int, heads: int, pp: int, v: int, recompute: str, seconds: float
) -> None:
    job = replace(
        make_job(cluster=f"a100x8x{pp}", policy="fp16-mixed", sequence=2048),
        shape=gpt("gpt", layers, hidden, heads),
        global_batch=8 * pp,
        layout=Layout(
            tp=8,
            pp=pp,
            interleave=v,
            recompute=recompute,  # type: ignore[arg-type]
            is_sequence_parallel=recompute == "selective",
        ),
        software=Software(attention="stored"),
    )
    assert step_time(job).seconds == pytest.approx(seconds, rel=0.12)


JOBS = [
    {"dp": 8, "zero": 3, "micro_batch": 2},
    {"dp": 2, "tp": 4, "zero": 1, "is_sequence_parallel": True, "recompute": "full"},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1},
    {"tp": 2, "pp": 4, "interleave": 2},
    {"dp": 4, "cp": 2, "zero": 1},
]


@pytest.mark.parametrize("layout", JOBS)
@pytest.mark.parametrize("policy", ["bf16-mixed", "fp8-hybrid"])
def test_parts_add_up_and_nothing_is_negative(make_job: MakeJob, layout: dict[str, object], policy: str) -> None:
    found = step_time(make_job(policy=policy, **layout))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0
    assert 0 < found.mfu < 1
    assert found.tokens_per_s_per_gpu * 8 * found.seconds == pytest.approx(64 * 4096)
    assert (found.parts["quantize"] > 0) == (policy == "fp8-hybrid")


def test_a_ring_of_more_gpus_sends_more_beside_attention(make_job: MakeJob) -> None:
    """Both have as many tokens and scores a GPU; a ring of 8 passes 7 blocks on, one of 4 passes 3 as large."""
    four = make_job(sequence=16384, dp=2, cp=4, zero=1, micro_batch=1)
    eight = make_job(sequence=16384, dp=1, cp=8, zero=1, micro_batch=2)
    assert step_time(four).parts["attention"] == pytest.approx(step_time(eight).parts["attention"])
    exposed = [step_time(job).parts["cp"] for job in (four, eight)]
    # Behind attention, which is long enough for both; the links' kernels slow it down all the same.
    assert exposed[1] == pytest.approx(7 / 3 * exposed[0]) and exposed[0] > 0
    alone = forward_time(replace(four, efficiency=replace(four.efficiency, contention=1.0)))
    assert alone.cp == 0


def test_no_step_is_faster_than_its_operations_at_the_peak(make_job: MakeJob) -> None:
    for layout in JOBS:
        job = make_job(**layout)
        weights = job.shape.linear_weights + job.shape.read_by_head
        ideal = 6 * weights * 64 * 4096 / 8 / (job.device.matmul_tflops["bf16"] * 1e12)
        assert step_time(job).seconds > ideal


def test_every_product_is_done_once_over_all_gpus(make_job: MakeJob) -> None:
    whole = sum(p.m * p.n * p.k * p.count for p in layer_products(make_job(dp=8)))
    cut = sum(p.m * p.n * p.k * p.count for p in layer_products(make_job(dp=2, tp=4)))
    assert whole == 4 * cut == 4096 * make_job(dp=8).shape.linear_weights // 32


def test_experts_multiply_what_a_token_visits(make_job: MakeJob) -> None:
    job = make_job("mixtral-8x7b", dp=8, ep=8)
    # Mixtral: 46.7 · 10⁹ parameters, 12.9 · 10⁹ active; without embedding and head 12.6.
    assert active_linear_weights(job) == pytest.approx(12.6e9, rel=0.01)
    products = {p.name: p for p in layer_products(job)}
    assert products["up"].count == 1
    assert products["up"].m * products["up"].count == 4096 * 2
    assert step_time(job).parts["ep"] > 0


def test_a_token_goes_once_to_each_place_that_has_experts_of_it(make_job: MakeJob) -> None:
    def exchange(once: bool) -> float:
        job = make_job("mixtral-8x7b", dp=8, ep=8, software=Software(sends_tokens_once=once))
        return step_time(job).parts["ep"]

    # 2 of 8 experts on 8 GPUs: 8 · (1 - (7/8)²) = 1.875 different ones.
    assert exchange(True) / exchange(False) == pytest.approx(1.875 / 2, rel=0.02)


def test_small_micro_batches_of_experts_wait_for_the_host(make_job: MakeJob) -> None:
    small = make_job("mixtral-8x7b", dp=8, ep=8, sequence=256)
    floor = 32 * 3 * small.software.expert_host_s * small.num_micro_batches
    assert step_time(small).seconds > floor
    assert step_time(small).parts["host"] > 0
    graph = replace(small, software=Software(expert_host_s=0.0))
    assert step_time(graph).parts["host"] == 0


def test_overlap_and_recomputation_cost_what_they_should(make_job: MakeJob) -> None:
    base = {"dp": 8, "tp": 1, "zero": 0}
    hidden = step_time(make_job(**base)).parts["dp"]
    shown = step_time(make_job(software=Software(overlaps_gradients=False), **base)).parts["dp"]
    assert shown > 1.5 * hidden
    none, full = (step_time(make_job(recompute=word, **base)) for word in ("none", "full"))
    assert full.parts["linear"] / none.parts["linear"] == pytest.approx(4 / 3, rel=0.03)


def test_tensor_parallelism_across_nodes_is_on_the_critical_path(make_job: MakeJob) -> None:
    inside = step_time(make_job("llama-3-70b", "h100x8x2", dp=2, tp=8, is_sequence_parallel=True))
    across = step_time(make_job("llama-3-70b", "h100x8x2", dp=1, tp=16, is_sequence_parallel=True))
    assert across.parts["tp"] > 2 * inside.parts["tp"]


@pytest.mark.parametrize(
    ("layers", "stages", "head", "expected"),
    [(80, 8, 5.0, [10] * 8), (126, 4, 2.0, [32, 32, 32, 30]), (7, 3, 1.0, [3, 2, 2]), (5, 5, 9.0, [1] * 5)],
)
def test_layers_of_stages(layers: int, stages: int, head: float, expected: list[int]) -> None:
    found = stage_layers(layers, stages, head)
    assert sum(found) == layers
    assert max(*found[:-1], found[-1] + head) == max(*expected[:-1], expected[-1] + head)


def test_bubbles(make_job: MakeJob) -> None:
    def bubble(job: Job) -> float:
        return step_time(job).parts["bubble"]

    plain = make_job(dp=1, pp=8)
    filled = replace(plain, layout=replace(plain.layout, schedule="zero-bubble"))
    both = replace(plain, layout=replace(plain.layout, schedule="zero-bubble-v"))
    chunks = replace(plain, layout=replace(plain.layout, interleave=4))
    # Attention's backward pass is none of the gradients of weights, so that somewhat more than a third is left.
    assert bubble(plain) / 3 < bubble(filled) < bubble(plain) / 2
    assert bubble(both) == pytest.approx(bubble(filled) / 2)
    assert bubble(chunks) == pytest.approx(bubble(plain) / 4)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 8), (8, 64)])
def test_zero_bubbles_are_the_published_ones_where_passes_are_equally_long(p: int, m: int) -> None:
    plain = (p - 1) * 3.0  # forward, backward and gradients of weights of 1 each
    first = plain * bubble_share("zero-bubble", 1.0, 2.0, 1.0)
    # ZB1P: (p - 1)/(3(m + p - 1)) of a step of 1F1B; ZBV: (p - 1)/(p - 1 + 6m) of its own. AMD's Primus has both.
    assert first / (3 * (m + p - 1)) == pytest.approx((p - 1) / (3 * (m + p - 1)))
    second = plain * bubble_share("zero-bubble-v", 1.0, 2.0, 1.0)
    assert second / (3 * m + second) == pytest.approx((p - 1) / (p - 1 + 6 * m))
    # Qi et al., arXiv:2401.10241: (p - 1)·(F + B - W).
    assert (p - 1) * 7.0 * bubble_share("zero-bubble", 2.0, 5.0, 1.5) == pytest.approx((p - 1) * (2 + 3.5 - 1.5))
    assert bubble_share("1f1b", 2.0, 5.0, 1.5) == bubble_share("gpipe", 2.0, 5.0, 1.5) == 1.0


def test_gradients_that_nobody_has_whole_are_reduced_every_micro_batch(make_job: MakeJob) -> None:
    software = Software(overlaps_gradients=False, overlaps_parameters=False)
    time = {
        zero: step_time(make_job(cluster="h100x8x2", dp=16, zero=zero, global_batch=64, software=software)).parts["dp"]
        for zero in (1, 2)
    }
    once = step_time(make_job(cluster="h100x8x2", dp=16, zero=2, global_batch=16, software=software)).parts["dp"]
    assert once == pytest.approx(time[1])
    gather = (4 * time[1] - time[2]) / 3  # of parameters, once a step whatever stage
    assert 0 < gather < time[1] / 2
