"""Dividing a training step over a cluster: layouts, step time, overlap, memory, planner, timeline; and serving.

    from bitwright import comms, hardware, parallel, training

    plan = parallel.plan_layouts(
        parallel.PlanRequest(
            shape=hardware.KNOWN_MODELS.get("llama-3-70b").shape,
            sequence=8192,
            global_batch=1024,
            topology=comms.topology("h100x8x16"),
            policies=(training.policy_named("bf16-mixed"),),
        )
    )
    plan.candidates[0].layout, plan.candidates[0].time.parts         # predicted; `advice` says why, and what to change

`efficiencies/` says what kernels reach on a device, `gemm_time` how long a product takes by its shape, `layer_time`
a layer, `overlap` what hides behind what, `step_time` a step, `memory` what it takes, `serving_time` a token,
`serving_plan` what a cluster serves. None of these needs torch; everything is predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.parallel.efficiency import Efficiency, efficiency_of, read_efficiency_file
    from bitwright.parallel.gemm_time import gemm_time
    from bitwright.parallel.job import Job, Software, Tuning
    from bitwright.parallel.layout import Layout
    from bitwright.parallel.memory import layout_memory
    from bitwright.parallel.planner import ParallelPlan, PlanRequest, plan_layouts
    from bitwright.parallel.serving_plan import ServingPlan, ServingRequest, plan_serving
    from bitwright.parallel.serving_time import ServingJob, decode_time, largest_batch, prefill_time
    from bitwright.parallel.step_time import StepTime, step_time
    from bitwright.parallel.timeline import Timeline, timeline

__all__ = [
    "Efficiency",
    "Job",
    "Layout",
    "ParallelPlan",
    "PlanRequest",
    "ServingJob",
    "ServingPlan",
    "ServingRequest",
    "Software",
    "StepTime",
    "Timeline",
    "Tuning",
    "decode_time",
    "efficiency_of",
    "gemm_time",
    "largest_batch",
    "layout_memory",
    "plan_layouts",
    "plan_serving",
    "prefill_time",
    "read_efficiency_file",
    "step_time",
    "timeline",
]

_HOMES = {
    "efficiency": ("Efficiency", "efficiency_of", "read_efficiency_file"),
    "gemm_time": ("gemm_time",),
    "job": ("Job", "Software", "Tuning"),
    "layout": ("Layout",),
    "memory": ("layout_memory",),
    "planner": ("ParallelPlan", "PlanRequest", "plan_layouts"),
    "serving_plan": ("ServingPlan", "ServingRequest", "plan_serving"),
    "serving_time": ("ServingJob", "decode_time", "largest_batch", "prefill_time"),
    "step_time": ("StepTime", "step_time"),
    "timeline": ("Timeline", "timeline"),
}

open_lazily(__name__, {name: f"bitwright.parallel.{module}" for module, names in _HOMES.items() for name in names})
