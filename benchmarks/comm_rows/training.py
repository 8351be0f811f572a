"""Step times of the published training runs: predicted, a constant share of the peak, a trivial roofline.

A group is one source on one device in one kind of format. It is calibrated on three rows (`read.calibration_rows`: the
smallest, median and largest number of GPUs), and so is the constant. The roofline is peak operations, peak bandwidth
of links, nothing hidden badly: max(compute, communication), uncalibrated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

from bitwright.parallel.job import Job, Tuning
from bitwright.parallel.layout import Layout, why_not
from bitwright.parallel.numerics import numerics_of
from bitwright.parallel.step_time import model_flops_per_token, shard_parameters, step_time
from bitwright.training.policy import policy_named
from comm_rows.fit import fit_factors
from comm_rows.read import LeftOut, Prediction, calibration_rows, read_rows
from comm_rows.shapes import shape_of
from comm_rows.sources import SOURCES, device_of, network_of

#: How a row's precision begins, in lower case → (policy, kind of format).
_POLICIES = (
    ("amp_bf16", "bf16-mixed", "16"),
    ("amp_fp8", "fp8-hybrid", "8"),
    ("bf16", "bf16-mixed", "16"),
    ("fp16", "fp16-mixed", "16"),
    ("fp8-hybrid", "fp8-hybrid", "8"),
    ("fp8-mx", "mxfp8", "8"),
    ("mxfp8", "mxfp8", "8"),
    ("nvfp4", "nvfp4", "4"),
    ("fp8", "fp8-hybrid", "8"),
)
_SCHEDULES = {"zbb": "zero-bubble", "zbv": "zero-bubble-v"}


def find_job(row: dict[str, Any]) -> tuple[Job, str] | str:
    """Return a row's step and its group, or why it cannot be predicted."""
    prefix = row["id"].split("-")[0]
    if prefix == "mlm" and row["device"].startswith("H100"):
        prefix = "mlmh"
    facts, shape = SOURCES.get(prefix), shape_of(row)
    if facts is None:
        return "no layout that can be told from the row" if prefix != "pr" else "batch not given"
    if row.get("oom") or "mem_param_opt_gib" in row:
        return "memory only"
    if shape is None:
        return "architecture not modelled (latent attention, Mamba, or sizes not published in the row)"
    known = device_of(row["device"])
    if known is None:
        return f"no figures for {row['device']}"
    device, efficiency, topology = known
    if prefix == "fms":
        topology = "vela-h100" if row["device"].startswith("H100") else "vela-a100"
    network = network_of(facts.topology or topology, row["gpus"])
    policy, kind = next(
        ((policy, kind) for start, policy, kind in _POLICIES if row["precision"].lower().startswith(start)), ("", "")
    )
    if not policy:
        return f"precision {row['precision']} not modelled"
    layout = find_layout(row, facts.zero, facts.is_sequence_parallel)
    if isinstance(layout, str):
        return layout
    batch = row.get("global_batch") or layout.dp * row.get("micro_batch", 0)
    batch -= batch % (layout.dp * layout.micro_batch)
    if not batch:
        return "batch smaller than one micro-batch on every GPU"
    software = facts.software
    if row["parallel"].get("async_tp"):
        software = replace(software, hidden_tp_share=0.6)
    if prefix == "mlm":
        software = replace(software, attention="stored")
    if row.get("compile") is False:
        software = replace(software, elementwise_passes=2.0)
    job = Job(
        shape=shape,
        sequence=row["seq"],
        global_batch=batch,
        layout=layout,
        numerics=numerics_of(policy_named(policy), gradient_bits=facts.gradient_bits),
        device=device,
        efficiency=efficiency,
        network=network,
        software=software,
    )
    reason = why_not(layout, shape, sequence=row["seq"], num_gpus=row["gpus"], global_batch=batch)
    if reason is not None and "interleaved" not in reason and "gathers every stage" not in reason:
        return f"layout cannot be as the row reads: {reason}"
    return job, f"{facts.title}, {device.name}, {kind} bits"


def find_layout(row: dict[str, Any], zero: int, is_sequence_parallel: bool) -> Layout | str:
    """Return the layout that a row tells."""
    given = row["parallel"]
    tp, pp, cp, ep = (given.get(name, 1) for name in ("tp", "pp", "cp", "ep"))
    if row["gpus"] % (tp * pp * cp):
        return f"tp {tp} · pp {pp} · cp {cp} does not divide {row['gpus']} GPUs"
    dp = row["gpus"] // (tp * pp * cp)
    stage = given.get("zero", zero)
    if row["id"].startswith("mb") and given.get("fsdp", 0) > 1:
        stage = 3
    if pp > 1 and stage == 2:
        stage = 1
    micro = row.get("micro_batch")
    if micro is None:
        if row["id"].startswith("mlm") and row["device"].startswith(("V100", "A100-SXM-40GB")):
            micro = row["global_batch"] // dp
        else:
            micro = 1
    if row["id"].startswith("tt") and pp > 1:
        micro = max(1, micro // pp)
    recompute = str(row.get("recompute", "none"))
    recompute = "full" if recompute == "full" else "selective" if recompute.startswith("selective") else "none"
    if recompute == "selective" and row["id"].startswith(("tt", "ao")):
        recompute = "operations"
    strategy = str(given.get("strategy", ""))
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=stage,
        zero_group=min(dp, 8) if strategy == "HSDP" else 0,
        micro_batch=micro,
        interleave=given.get("vp", 1) if pp > 1 else 1,
        schedule=_SCHEDULES.get(str(given.get("schedule", "")), "1f1b"),  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        is_sequence_parallel=(is_sequence_parallel or "seqpar" in str(row.get("recompute", ""))) and tp > 1,
    )


def step_seconds(row: dict[str, Any], job: Job) -> float | None:
    """Return the measured seconds of a step: as told, or from a rate and the operations that its source counts."""
    tokens = job.global_batch * job.sequence / row["gpus"]
    if "step_time_s" in row:
        scale = job.global_batch / row["global_batch"] if row.get("global_batch") else 1.0
        return float(row["step_time_s"]) * scale
    if "tokens_per_s_per_gpu" in row:
        return tokens / row["tokens_per_s_per_gpu"]
    shape, s = job.shape, job.sequence
    layers, hidden, vocab = shape.num_layers, shape.hidden_size, shape.vocab_size
    if "hw_tflops_per_gpu" in row or ("tflops_per_gpu" in row and row.get("recompute") == "full"):
        rate = row.get("hw_tflops_per_gpu") or row["tflops_per_gpu"]
        flops = 96 * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (16 * layers * hidden))
        return tokens * flops / (rate * 1e12)
    if "tflops_per_gpu" in row:
        flops = 72 * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * layers * hidden))
        return tokens * flops / (row["tflops_per_gpu"] * 1e12)
    if "mfu_pct" in row and "global_batch" in row:
        flops = model_flops_per_token(job) + 6 * layers * shape.num_heads * shape.head_dim * s
        return tokens * flops / (row["mfu_pct"] / 100 * 989.4e12)
    return None


def predict_training(*, per_source: bool = False) -> tuple[list[Prediction], list[LeftOut]]:
    """Return every training row, predicted or left out.

    Args:
        per_source: whether all rows of a source share three rows of calibration, whatever their device and width.
    """
    left: list[LeftOut] = []
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    seen: dict[tuple[Any, ...], str] = {}
    for row in read_rows("training"):
        found = find_job(row)
        if isinstance(found, str):
            left.append(LeftOut(row=row["id"], reason=found))
            continue
        job, group = found
        if per_source:
            group = group.split(",")[0]
        seconds = step_seconds(row, job)
        if seconds is None:
            left.append(LeftOut(row=row["id"], reason="neither time nor rate with a batch"))
            continue
        key = (group, job.layout, row["hidden"] if "hidden" in row else row["model"], row["gpus"], round(seconds, 3))
        if key in seen:
            left.append(LeftOut(row=row["id"], reason=f"the same run as {seen[key]}"))
            continue
        seen[key] = row["id"]
        groups[group].append({**row, "job": job, "seconds": seconds})
    return [found for group, rows in groups.items() for found in _predict_group(group, rows)], left


def _predict_group(group: str, rows: list[dict[str, Any]]) -> list[Prediction]:
    chosen = calibration_rows(rows, "gpus")
    measured = [row["seconds"] for row in chosen]
    factors = fit_factors(
        lambda index, found: step_time(replace(chosen[index]["job"], tuning=Tuning(**found))).seconds, measured
    )
    tuning = Tuning(**factors)
    shares = [_ideal_s(row["job"]) / row["seconds"] for row in chosen]
    share = math.exp(sum(map(math.log, shares)) / len(shares)) if shares else 0.4
    print(
        f"  {group}: {len(rows)} rows, "
        + ", ".join(f"{n} × {v:.2f}" for n, v in factors.items())
        + f", constant {share:.3f}"
    )
    return [
        Prediction(
            row=row["id"],
            group=group,
            measured=row["seconds"],
            predicted=step_time(replace(row["job"], tuning=tuning)).seconds,
            constant=_ideal_s(row["job"]) / share,
            roofline=_roofline_s(row["job"]),
            is_calibration=row in chosen,
            gpus=row["gpus"],
        )
        for row in rows
    ]


def _ideal_s(job: Job) -> float:
    """Seconds of the model's own operations at the 16-bit peak, attention counted whole, as most sources do."""
    tokens = job.global_batch * job.sequence / job.layout.num_gpus
    peak = job.device.matmul_tflops.get("bf16") or job.device.matmul_tflops["fp16"]
    whole = 6 * job.shape.num_layers * job.shape.num_heads * job.shape.head_dim * job.sequence
    return tokens * (model_flops_per_token(job) + whole) / (peak * 1e12)


def _roofline_s(job: Job) -> float:
    """The slower of all operations at the peak of their format, and all gradients over the links."""
    peaks = job.device.matmul_tflops
    speed_up = peaks.get(job.numerics.forward, peaks.get("bf16", 1)) / (peaks.get("bf16") or peaks["fp16"])
    compute = _ideal_s(job) / speed_up * (4 / 3 if job.layout.recompute == "full" else 1)
    dense, experts = shard_parameters(job)
    levels = job.network.topology.levels  # type: ignore[attr-defined]
    bandwidth = levels[0 if job.layout.num_gpus <= job.network.gpus_per_node else 1].one_way_gb_per_s
    factor = 3 if job.layout.zero == 3 else 2
    moved = factor * (dense + experts) * job.numerics.gradient_bits / 8 if job.layout.dp > 1 else 0.0
    return max(compute, moved / (bandwidth * 1e9))
