"""The planner: what it finds fits, nothing that was tried is better, and what cannot be says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitwright import comms
from bitwright.errors import CommsError, ParallelError
from bitwright.hardware import KNOWN_MODELS
from bitwright.parallel.advice import bottleneck_of, changes, ranked_parts, reason_of
from bitwright.parallel.layout import Layout, why_not
from bitwright.parallel.memory import layout_memory
from bitwright.parallel.numerics import faster_numerics
from bitwright.parallel.planner import PlanRequest, plan_layouts
from bitwright.parallel.policy_memory import memory_facts
from bitwright.parallel.step_time import step_time
from bitwright.training.policy import policy_named

BF16 = policy_named("bf16-mixed")


def request(model: str = "llama-3-8b", cluster: str = "h100x8", batch: int = 64, **more) -> PlanRequest:  # type: ignore[no-untyped-def]
    return PlanRequest(
        shape=KNOWN_MODELS.get(model).shape,
        sequence=more.pop("sequence", 4096),
        global_batch=batch,
        topology=comms.topology(cluster),
        policies=more.pop("policies", (BF16,)),
        **more,
    )


@pytest.mark.parametrize(("model", "cluster"), [("llama-3-8b", "h100x8"), ("llama-3-70b", "h100x8x4")])
def test_what_is_found_fits_and_comes_in_order(model: str, cluster: str) -> None:
    plan = plan_layouts(request(model, cluster), limit=20)
    times = [found.time.seconds for found in plan.candidates]
    assert times == sorted(times)
    for found in plan.candidates:
        memory = layout_memory(found.job, memory_facts(BF16))
        assert memory.total == found.memory.total <= plan.usable_bytes
        assert (
            why_not(
                found.layout,
                found.job.shape,
                sequence=4096,
                num_gpus=found.job.network.topology.num_ranks,  # type: ignore[attr-defined]
                global_batch=64,
            )
            is None
        )
        assert step_time(found.job).seconds == found.time.seconds


def test_the_best_is_as_fast_as_any_layout_of_one_node() -> None:
    best = plan_layouts(request()).candidates[0]
    facts = memory_facts(BF16)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            if tp * pp > 8:
                continue
            for zero in (1, 3) if pp == 1 else (1,):
                for micro in (1, 2, 4, 8):
                    layout = Layout(
                        dp=8 // tp // pp, tp=tp, pp=pp, zero=zero, micro_batch=micro, is_sequence_parallel=tp > 1
                    )
                    if why_not(layout, best.job.shape, sequence=4096, num_gpus=8, global_batch=64):
                        continue
                    job = replace(best.job, layout=layout)
                    if layout_memory(job, facts).total <= 0.95 * best.job.device.memory_bytes:
                        assert step_time(job).seconds >= best.time.seconds * (1 - 1e-9)


def test_a_model_that_no_layout_holds_shows_the_nearest_miss() -> None:
    plan = plan_layouts(request("llama-3.1-405b"))
    assert not plan.candidates
    assert plan.num_fit == 0 < plan.num_too_large
    assert plan.nearest_miss is not None
    # 18 bytes of 405 · 10⁹ parameters over 8 GPUs are 912 GB.
    assert plan.nearest_miss.memory.total == pytest.approx(912e9, rel=0.05)
    assert plan.nearest_miss.memory.total > plan.usable_bytes


def test_tensor_parallelism_stays_in_a_node_and_fp8_is_compared() -> None:
    plan = plan_layouts(request("llama-3-70b", "h100x8x8", 256, policies=(BF16, policy_named("fp8-hybrid"))), limit=30)
    assert all(found.layout.tp <= 8 for found in plan.candidates)
    assert {found.policy for found in plan.candidates} == {"bf16-mixed", "fp8-hybrid"}
    assert plan.candidates[0].policy == "fp8-hybrid"


def test_axes_can_be_given() -> None:
    plan = plan_layouts(request(fixed=(("tp", 4), ("pp", 2), ("micro_batch", 2))), limit=9)
    assert {(f.layout.tp, f.layout.pp, f.layout.micro_batch) for f in plan.candidates} == {(4, 2, 2)}


def test_experts_are_dealt_out() -> None:
    plan = plan_layouts(request("mixtral-8x7b", "h100x8x4", 64), limit=1)
    assert plan.candidates[0].layout.ep > 1


def test_ranks_that_do_not_divide_say_so() -> None:
    # Seven sequences go to one copy of the model, which eight GPUs may hold in two ways.
    words = r"8 GPUs with tp=1, pp=1; most often: .*; tp may be 8; or pp may be 8 \(the others as given\)"
    with pytest.raises(ParallelError, match=words):
        plan_layouts(request(batch=7, fixed=(("tp", 1), ("pp", 1))))
    # Thirteen GPUs divide neither 12 heads nor 12 layers, so no other size of what is given helps.
    with pytest.raises(ParallelError, match=r"13 GPUs with zero=2; most often: .*; change the batch or the cluster"):
        plan_layouts(request("gpt2", "h100x1x13", batch=6, sequence=1024, fixed=(("zero", 2),)))
    with pytest.raises(ParallelError, match="global_batch is 0"):
        request(batch=0)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ((("tp", 16),), "with tp=16; tp may be 1, 2, 4, 8$"),
        ((("zero_group", 3),), "zero_group may be 1, 2, 4, 8$"),
        ((("micro_batch", 3),), "micro_batch may be 1, 2, 4, 8, 16, 32$"),
        ((("ep", 2),), "ep may be 1$"),
        ((("tp", 2), ("pp", 3)), r"with tp=2, pp=3; pp may be 1, 2, 4 \(the others as given\)$"),
        ((("tp", 3), ("micro_batch", 3)), "alone, tp may be 1, 2, 4, 8; alone, micro_batch may be 1, 2, 4, 8, 16, 32$"),
    ],
)
def test_axes_that_leave_no_layout_are_named_with_what_they_may_be(
    fixed: tuple[tuple[str, int], ...], words: str
) -> None:
    with pytest.raises(ParallelError, match=words):
        plan_layouts(request(batch=32, fixed=fixed))


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ((("tp", 0),), "tp is 0; its least size is 1"),
        ((("zero", -1),), "zero is -1; its least size is 0"),
        ((("dp", 2),), "there is no axis 'dp' to give"),
        ((("tp", 2), ("tp", 4)), "tp=2 and tp=4 cannot both be"),
        ((("schedule", "zb"),), "schedule is 'zb'"),
    ],
)
def test_axes_that_say_nothing_are_refused(fixed: tuple[tuple[str, int | str], ...], words: str) -> None:
    with pytest.raises(ParallelError, match=words):
        request(fixed=fixed)


def test_everything_that_takes_time_is_ranked() -> None:
    best = plan_layouts(request("llama-3-70b", "h100x8x16", 1024, sequence=8192)).candidates[0]
    found = ranked_parts(best.time)
    shares = {part.what: part.share for part in found}
    assert sum(shares.values()) == pytest.approx(1)
    assert [part.seconds for part in found] == sorted((part.seconds for part in found), reverse=True)
    assert found[0].what == "products" and found[1].what == "recomputation"
    # Whole layers are computed again: the step without it is shorter by as much, up to what hides behind it.
    without = step_time(replace(best.job, layout=replace(best.layout, recompute="none")))
    saved = (best.time.seconds - without.seconds) / best.time.seconds
    assert shares["recomputation"] == pytest.approx(saved, abs=0.03)
    assert shares["exposed communication"] == pytest.approx(best.exposed_share)
    assert bottleneck_of(best.time).startswith("products: ") and "--policy" in bottleneck_of(best.time)


def test_a_cluster_without_a_device_or_with_a_missing_link(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    level = 'kind = "NVSwitch"\nmedium = "nvlink"\nmembers = 8\n'
    figures = 'one_way_gb_per_s = 450\nsource = "mine"\ncertainty = "recalled"\n'
    file.write_text(f'name = "mine"\n[[levels]]\n{level}{figures}')
    with pytest.raises(ParallelError, match="topology minex8 names no device"):
        request(cluster=str(file))
    file.write_text(f'name = "mine"\n[[levels]]\n{level}')
    with pytest.raises(CommsError, match=r"levels\.0\.one_way_gb_per_s"):
        request(cluster=str(file))


def test_a_policy_that_the_device_does_not_run_is_refused() -> None:
    with pytest.raises(ParallelError, match=r"'fp8-hybrid' does not run on this cluster: a100-sxm has no matrix unit"):
        plan_layouts(request(cluster="a100x8", policies=(policy_named("fp8-hybrid"),)))


def test_reasons_and_changes_are_the_models_own() -> None:
    best = plan_layouts(request("llama-3-70b", "h100x8x8", 256, fixed=(("tp", 8), ("pp", 2)))).candidates[0]
    said = reason_of(best.job, best.time)
    assert "tp within a node" in said and "bubble" in said
    assert "% of the step" in bottleneck_of(best.time)
    others = faster_numerics(best.job.device, ["bf16-mixed"])
    assert {other.name for other in others} == {"fp8-hybrid", "fp8-block"}
    found = {change.what: change.gain for change in changes(best.job, best.time, others)}
    assert 0.1 < found["policy fp8-hybrid"] < 0.9
    assert found["tp 16, across nodes"] < -0.05
    assert found["chunked (asynchronous) tensor parallelism"] > 0.02
    gains = list(found.values())
    assert gains == sorted(gains, reverse=True)
