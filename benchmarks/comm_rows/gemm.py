"""Times of published matrix products: predicted by shape, as a constant share of the peak, as a roofline.

A group is one file of a source on one device, each kernel of its own where a file compares kernels; best shapes of many
devices are one group. Three rows calibrate it: fewest, median and most operations; three factors follow, of computing,
of moving and of launching. `per_source`: one calibration for all rows of a repository, whatever their device, kernel
and format. The sweeps that `parallel/efficiencies` were fitted to (microsoft/vidur) are not calibrated again, and are
told apart in the report: what one of their models says of the other is what `fit_products.py` prints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from bitwright.hardware.device import Device
from bitwright.hardware.roofline import matmul_tflops
from bitwright.parallel.efficiency import Efficiency
from bitwright.parallel.gemm_time import SPLITS, gemm_time, quantize_time_s
from comm_rows.fit import fit_factors
from comm_rows.read import LeftOut, Prediction, calibration_rows, read_rows
from comm_rows.sources import find_device

#: Beginning of a row's device → device. The H800 is an H100 with fewer links.
_DEVICES = (
    ("A100", "a100-sxm"),
    ("A40", "a40"),
    ("H100", "h100-sxm"),
    ("H800", "h100-sxm"),
    ("H200 NVL", "h200-nvl"),
    ("H200", "h200-sxm"),
    ("B200", "b200"),
    ("B300", "b300"),
    ("GB200", "gb200"),
    ("MI300X", "mi300x"),
    ("MI355X", "mi355x"),
    ("Gaudi3", "gaudi-3"),
)
#: How a precision begins → format, bits of an operand with its scales, and whether scales take a pass of their own.
_FORMATS = (
    ("bf16", "bf16", 16.0, False),
    ("fp16", "fp16", 16.0, False),
    ("fp8-current", "fp8_e4m3", 8.0, True),
    ("fp8", "fp8_e4m3", 8.25, False),
    ("mxfp8", "fp8_e4m3", 8.25, False),
    ("nvfp4", "fp4_e2m1", 4.5, True),
)
#: A layer of TransformerEngine's table: out and in of its four products.
_LAYER = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
_WIDTHS = {"compute": 0.4, "memory": 0.3, "launch": 2.0}
#: Of the peak, where nothing calibrates the constant.
_USUAL_SHARE = 0.7
_FITTED = "microsoft/vidur"


def predict_gemm(*, per_source: bool = False) -> tuple[list[Prediction], list[LeftOut]]:
    """Return every product, predicted or left out."""
    left: list[LeftOut] = []
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_rows("gemm"):
        found = _products(row)
        if isinstance(found, str):
            left.append(LeftOut(row=row["id"], reason=found))
        else:
            for product in found:
                groups[row["repo"] if per_source else product["group"]].append(product)
    return [found for group, rows in sorted(groups.items()) for found in _predict_group(group, rows)], left


def _products(row: dict[str, Any]) -> list[dict[str, Any]] | str:
    if row.get("is_host_bound"):
        return "time of the host, not of the product (the source's floor of 70 µs)"
    known = next((name for start, name in _DEVICES if row["device"].startswith(start)), None)
    if known is None:
        return f"no device file for {row['device']}"
    formats = next((entry for entry in _FORMATS if row["precision"].startswith(entry[0])), None)
    if formats is None:
        return f"precision {row['precision']}"
    device, efficiency = find_device(known)
    _, name, bits, needs_pass = formats
    if name not in device.matmul_tflops:
        return f"{device.name} has no rate for {name}"
    sizes: list[tuple[int, int, int, int]]
    if "m" in row:
        sizes = [(row["m"], row["n"], row["k"], row.get("groups", 1))]
        if "grouped" in row["precision"]:
            sizes = [(row["m"], row["n"], row["k"], row["groups"])]
        elif "grouped" in row.get("op", ""):
            count = row["groups"]
            m = row["m"] // count
            n, k = row["n"], row["k"]
            sizes = [(m, n, k, count), (m, k, n, count), (n, k, m, count)]
    elif row.get("op", "").startswith("12 GEMMs"):
        m = 15872
        sizes = [s for n, k in _LAYER for s in ((m, n, k, 1), (m, k, n, 1), (n, k, m, 1))]
    else:
        return "shape not in the row"
    is_quantized = "autocast" in row.get("mode", "") or "quantization" in row.get("op", "")
    is_quantized = is_quantized and bits < 16
    flops = sum(2 * m * n * k * count for m, n, k, count in sizes)
    where = f"{row['repo'].split('/')[-1]} {PurePosixPath(row['where']).stem}"
    if row["repo"] == _FITTED:
        where = _FITTED
    kernel = row.get("kernel", "") if row["repo"].startswith("vllm") else ""
    group = ", ".join(filter(None, (where, "" if "best over" in row.get("kernel", "") else device.name, kernel)))
    made = {
        "id": row["id"],
        "group": group,
        "sizes": sizes,
        "flops": flops,
        "device": device,
        "efficiency": efficiency,
        "format": name,
        "bits": bits,
        "needs_pass": needs_pass,
        "is_quantized": is_quantized,
        "splits": (1,) if "8" in row["precision"] and "TransformerEngine" not in row["repo"] else SPLITS,
        "is_fitted": row["repo"] == _FITTED,
    }
    found = []
    if "time_us" in row:
        found.append({**made, "seconds": row["time_us"] * 1e-6})
    elif "tflops" in row:
        found.append({**made, "seconds": flops / (row["tflops"] * 1e12)})
    if "fp16_us" in row:
        other = {"group": f"{where}, {device.name}, fp16", "format": "fp16", "bits": 16.0, "splits": SPLITS}
        found.append({**made, **other, "id": f"{row['id']}-fp16", "seconds": row["fp16_us"] * 1e-6})
    return found or "speed-up only, no time"


def _predict_group(group: str, rows: list[dict[str, Any]]) -> list[Prediction]:
    chosen = [] if rows[0]["is_fitted"] else calibration_rows(rows, "flops")
    factors = fit_factors(
        lambda index, found: _seconds(chosen[index], found), [row["seconds"] for row in chosen], _WIDTHS
    )
    shares = [_ideal_s(row) / row["seconds"] for row in chosen]
    share = math.exp(sum(map(math.log, shares)) / len(shares)) if shares else _USUAL_SHARE
    return [
        Prediction(
            row=row["id"],
            group=group,
            measured=row["seconds"],
            predicted=_seconds(row, factors),
            constant=_ideal_s(row) / share,
            roofline=_roofline_s(row),
            is_calibration=row in chosen,
            is_fitted=row["is_fitted"],
        )
        for row in rows
    ]


def _seconds(row: dict[str, Any], factors: dict[str, float]) -> float:
    device, record = row["device"], _changed(row["efficiency"], factors)
    bits = row["bits"]
    total = 0.0
    for m, n, k, count in row["sizes"]:
        total += gemm_time(
            device,
            record,
            m=m,
            n=n,
            k=k,
            count=count,
            format=row["format"],
            x_bits=bits,
            w_bits=bits,
            splits=row["splits"],
        ).seconds
        if row["is_quantized"]:
            for values in (m * k * count, n * k * count):
                total += quantize_time_s(
                    device, record, values=values, to_bits=bits, writes=1, needs_amax_pass=row["needs_pass"]
                )
    return total


def _changed(record: Efficiency, factors: dict[str, float]) -> Efficiency:
    shares = {name: min(1.0, share / factors["compute"]) for name, share in record.matmul_share.items()}
    return replace(
        record,
        matmul_share=MappingProxyType(shares),
        memory_share=min(1.0, record.memory_share / factors["memory"]),
        launch_s=record.launch_s * factors["launch"],
    )


def _ideal_s(row: dict[str, Any]) -> float:
    return float(row["flops"] / (matmul_tflops(row["device"], row["format"]) * 1e12))


def _roofline_s(row: dict[str, Any]) -> float:
    device: Device = row["device"]
    bits = row["bits"]
    total = 0.0
    for m, n, k, count in row["sizes"]:
        moved = count * (m * k * bits + n * k * bits + m * n * 16) / 8
        compute = 2 * m * n * k * count / (matmul_tflops(device, row["format"]) * 1e12)
        total += max(compute, moved / (device.memory_gb_per_s * 1e9))
    return total
