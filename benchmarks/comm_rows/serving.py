"""Seconds a token of published decoding, and seconds of published prefill.

A group is one source on one device, decoding or prefill; three rows calibrate it (smallest, median, largest number of
GPUs), by up to three factors: of moving, of unpacking weights, of launching. `per_source`: one calibration for all
rows of an engine, whatever their device. llama.cpp's several GPUs hold layers one
after the other, so a token takes as long as on one of them; a long prompt is cut and fills them like a pipeline.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bitwright.parallel.serving_time import ServingJob, decode_time, prefill_time
from comm_rows.fit import fit_factors
from comm_rows.read import LeftOut, Prediction, calibration_rows, read_rows
from comm_rows.shapes import shape_of
from comm_rows.sources import find_device, network_of

#: Device of a row, as it begins → device of the catalog or of `data/comm/devices`.
_DEVICES = (
    ("3070", "rtx-3070"),
    ("3080 Ti", "rtx-3080-ti"),
    ("3080", "rtx-3080"),
    ("3090", "rtx-3090"),
    ("RTX 3090", "rtx-3090"),
    ("4070 Ti", "rtx-4070-ti"),
    ("4080", "rtx-4080"),
    ("4090", "rtx-4090"),
    ("RTX 4090", "rtx-4090"),
    ("A100 PCIe", "a100-pcie"),
    ("A100 SXM", "a100-sxm"),
    ("A100-SXM", "a100-sxm"),
    ("A40", "a40"),
    ("H100 PCIe", "h100-pcie"),
    ("H100-SXM", "h100-sxm"),
    ("H100", "h100-sxm"),
    ("B200", "b200"),
    ("L40S", "l40s"),
    ("M1 Max", "apple-m1-max"),
    ("M1 7", "apple-m1"),
    ("M2 Ultra", "apple-m2-ultra"),
    ("M3 Max", "apple-m3-max"),
    ("RTX 4000 Ada", "rtx-4000-ada"),
    ("RTX 5000 Ada", "rtx-5000-ada"),
    ("RTX 6000 Ada", "rtx-6000-ada"),
    ("RTX A6000", "rtx-a6000"),
)
#: Beginning of a precision, in lower case → bits of a weight, of the head, and format of products.
_PRECISIONS = (
    ("f16", 16.0, 16.0, "fp16"),
    ("fp16", 16.0, 16.0, "fp16"),
    ("bf16", 16.0, 16.0, "bf16"),
    ("q4_k_m", 4.75, 6.56, "fp16"),
    ("int8", 8.0, 8.0, "bf16"),
    ("int4-g32", 5.0, 5.0, "bf16"),
    ("fp8", 8.0, 16.0, "fp8_e4m3"),
    ("gptq 4b g128", 4.16, 16.0, "fp16"),
    ("exl2", 0.0, 6.0, "fp16"),
)
_WIDTHS = {"memory": 0.2, "packed": 0.1, "launch": 1.0}
#: Tokens that llama.cpp runs at once (its `ubatch`).
_CHUNK = 512
#: Engine → share of the bandwidth that its packed weights reach at 8 bits and at fewer, and how many times as many
#: launches it has as a captured graph of fused kernels: llama.cpp's builds of these rows had no graphs, and a kernel
#: for every operation.
_ENGINES = {"llama.cpp": (0.92, 0.92, 2.0), "exllamav2": (0.9, 0.9, 1.0), "gpt-fast": (0.85, 0.7, 1.0)}
#: Shapes that the rows do not give.
_NAMES = {"llama 7b": "llama2-7b", "llama 70b": "llama2-70b", "llama-13b": "llama2-13b", "codellama-34b": "llama2-34b"}


def predict_decode(*, per_source: bool = False) -> tuple[list[Prediction], list[LeftOut]]:
    """Return every row of decoding, predicted or left out."""
    return _predict("decode", per_source=per_source)


def predict_prefill(*, per_source: bool = False) -> tuple[list[Prediction], list[LeftOut]]:
    """Return every row of prefill, predicted or left out."""
    return _predict("prefill", per_source=per_source)


def _predict(phase: str, *, per_source: bool) -> tuple[list[Prediction], list[LeftOut]]:
    left: list[LeftOut] = []
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_rows("serving"):
        found = _job(row, phase)
        if isinstance(found, str):
            left.append(LeftOut(row=row["id"], reason=found))
        elif found is not None:
            groups[found["engine"] if per_source else found["group"]].append(found)
    return [found for group, rows in sorted(groups.items()) for found in _predict_group(group, rows)], left


def _job(row: dict[str, Any], phase: str) -> dict[str, Any] | str | None:
    """A row with its job and what was measured, why it is left out, or None where it is of the other phase."""
    engine = str(row.get("engine", "")).split()[0]
    batch, context = row.get("batch", 1), row.get("gen_or_prompt_len") or row.get("isl") or 128
    if phase == "decode":
        if "decode_tokens_per_s" in row:
            seconds = 1 / row["decode_tokens_per_s"]
            context = max(1, context // 2) if engine == "llama.cpp" else 100 + context
            if engine == "vLLM":
                batch, context, seconds = 128, 1056, 128 / row["decode_tokens_per_s"]
        elif "output_tokens_per_s" in row or "tpot_ms" in row:
            return "batch that ran is not given" if "batch" not in row else "prefill and decoding in one figure"
        else:
            return None
    elif "prefill_tokens_per_s" in row:
        if engine == "vLLM":
            batch, context = 1, 4096
        seconds = batch * context / row["prefill_tokens_per_s"]
    elif "ttft_ms" in row and "output_tokens_per_s" not in row:
        seconds = row["ttft_ms"] / 1e3
    else:
        return None
    if "tpot_ms" in row or "itl_ms" in row:
        return "bound by the host's launches"
    known = next((name for start, name in _DEVICES if row["device"].startswith(start)), None)
    if known is None:
        return f"no device file for {row['device']}"
    shape = shape_of({**row, "model": _NAMES.get(row["model"].lower(), row["model"])})
    if shape is None:
        return f"shape of {row['model']} not known"
    precision = row["precision"].lower()
    entry = next((e for e in _PRECISIONS if precision.startswith(e[0])), None)
    if entry is None:
        return f"precision {row['precision']}"
    _, bits, head, compute = entry
    bits = bits or float(precision.split()[1].removesuffix("bpw"))
    device, record = find_device(known)
    packed, narrow, launches = _ENGINES.get(engine, (0.85, 0.75, 1.0))
    record = replace(record, launch_s=launches * record.launch_s)
    tp = row.get("parallel", {}).get("tp", 1)
    compute = compute if compute in device.matmul_tflops else "fp16" if "fp16" in device.matmul_tflops else "bf16"
    job = ServingJob(
        shape=shape,
        device=device,
        efficiency=record,
        network=network_of("h100" if device.name.startswith("h100") else "a100", tp) if tp > 1 else None,
        tp=tp,
        weight_bits=bits,
        head_bits=head,
        compute=compute,
        packed_share=packed if bits >= 8 else narrow,
        batch=batch,
        context=context,
    )
    return {
        "id": row["id"],
        "group": f"{engine}, {device.name}",
        "engine": engine,
        "job": job,
        "gpus": row.get("gpus", 1),
        "stages": row.get("parallel", {}).get("layer_split", 1),
        "seconds": seconds,
        "phase": phase,
    }


def _predict_group(group: str, rows: list[dict[str, Any]]) -> list[Prediction]:
    chosen = calibration_rows(rows, "gpus")
    factors = fit_factors(
        lambda index, found: _seconds(chosen[index], found), [row["seconds"] for row in chosen], _WIDTHS
    )
    shares = [_ideal_s(row) / row["seconds"] for row in chosen]
    share = math.exp(sum(map(math.log, shares)) / len(shares)) if shares else 0.7
    return [
        Prediction(
            row=row["id"],
            group=group,
            measured=row["seconds"],
            predicted=_seconds(row, factors),
            constant=_ideal_s(row) / share,
            roofline=_ideal_s(row),
            is_calibration=row in chosen,
            gpus=row["gpus"],
        )
        for row in rows
    ]


def _seconds(row: dict[str, Any], factors: dict[str, float]) -> float:
    job: ServingJob = row["job"]
    record = job.efficiency
    compute = factors["memory"] if row["phase"] == "prefill" else 1.0
    record = replace(
        record,
        memory_share=min(1.0, record.memory_share / factors["memory"]),
        launch_s=record.launch_s * factors["launch"],
        matmul_share=MappingProxyType({name: min(1, s / compute) for name, s in record.matmul_share.items()}),
    )
    job = replace(job, efficiency=record, packed_share=job.packed_share / factors["packed"])
    if row["phase"] == "decode":
        return decode_time(job).seconds
    if row["engine"] != "llama.cpp":
        return prefill_time(job).seconds
    chunks = max(1, job.context // _CHUNK)
    one = prefill_time(replace(job, context=min(_CHUNK, job.context)))
    whole = chunks * (one.seconds - one.parts["attention"]) + prefill_time(job).parts["attention"]
    return whole * (chunks + row["stages"] - 1) / chunks / row["stages"]


def _ideal_s(row: dict[str, Any]) -> float:
    """Weights and caches at the peak bandwidth; operations at the peak rate where those are slower."""
    job: ServingJob = row["job"]
    moved = (job.weight_bytes + job.batch * job.cache_bytes) / (job.device.memory_gb_per_s * 1e9)
    rows = job.batch * (job.context if row["phase"] == "prefill" else 1)
    flops = 2 * rows * (job.shape.linear_weights + job.shape.read_by_head) / job.tp
    return max(moved, flops / (job.device.matmul_tflops[job.compute] * 1e12))
