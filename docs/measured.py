"""The page on quantising tensors: what the verbs do, and tables of what was measured, read from the result files.

Figures are those of benchmarks/results/*.json; what has not been measured yet says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Backends in the order of the table of exactness.
_BACKENDS = ("cpu", "torch", "reference")


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _where(results: Mapping[str, Any]) -> str:
    """Where a file was measured, and when, as far as it says."""
    machine = results["machine"]
    known = [
        machine["cpu"],
        f"{machine['cores']} cores",
        f"Python {machine['python']}",
        f"torch {machine['torch']}",
        f"commit {machine['commit'].rstrip('+')}" if machine.get("commit") else "",
        results.get("date", results.get("measured", "")),
    ]
    return ", ".join(word for word in known if word)


def exactness_table() -> str:
    """How many results were compared, and how many differ, by format and backend."""
    results = _result("exhaustive.json")
    if results is None:
        return "Not measured yet: `python benchmarks/exhaustive.py`."
    found = results["results"]
    lines = [
        f"| format | judged by | {' | '.join(f'`{backend}`' for backend in _BACKENDS)} |",
        f"| --- | --- |{' --: |' * len(_BACKENDS)}",
    ]
    for name in dict.fromkeys(row["format"] for row in found):
        rows = [row for row in found if row["format"] == name]
        judges = ", ".join(dict.fromkeys(row["oracle"] for row in rows))
        cells = []
        for backend in _BACKENDS:
            own = [row for row in rows if row["backend"] == backend]
            cells.append(f"{sum(r['differences'] for r in own):,} of {sum(r['inputs'] for r in own):,}" if own else "–")
        lines.append(f"| `{name}` | {judges} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nMeasured on {_where(results)} (`benchmarks/results/exhaustive.json`)."


def speed_tables() -> str:
    """Speed against a memcpy and against other libraries."""
    results = _result("quantize.json")
    if results is None:
        return "Not measured yet: `python benchmarks/quantize.py`."
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import rows

    tables = rows.markdown([rows.from_record(record) for record in results["rows"]], results["groups"])
    where = f"{_where(results)}, {results['threads']} threads (`benchmarks/results/quantize.json`)"
    return f"{tables}\n\nMeasured on {where}."


def histogram_table() -> str:
    """Speed and memory of the streamed histogram."""
    results = _result("histogram.json")
    if results is None:
        return "Not measured yet: `python benchmarks/histogram.py`."
    lines = ["| a file of 1 GiB in | read at | whole process | largest memory |", "| --- | --: | --: | --: |"]
    lines += [
        f"| {row['dtype']} | {row['read_gib_per_s']:.2f} GiB/s | {row['process_s']:.2f} s | {row['peak_mib']:.0f} MiB |"
        for row in results["rows"]
    ]
    return "\n".join(lines) + f"\n\nMeasured on {_where(results)} (`benchmarks/results/histogram.json`)."


def gpu_sentence() -> str:
    """Whether the GPU kernels have run on a GPU."""
    results = _result("gpu-check.json")
    if results is None:
        return (
            "The Triton kernels are tested in Triton's interpreter and compiled for NVIDIA GPUs, and have not run on a "
            "GPU yet; `make gpu-check` checks them and measures their speed on one."
        )
    return f"The Triton kernels were checked on a GPU: {_where(results)} (`benchmarks/results/gpu-check.json`)."


def quantize_page(notice: str, backends: str) -> str:
    """docs/quantize.md"""
    snippet = (ROOT / "docs" / "snippets" / "tensors.py").read_text(encoding="utf-8")
    return f"""# Quantising tensors

{notice}

```python
{snippet}```

Tensors are fp32, bf16 or fp16. All arithmetic is fp32 in a fixed order, codes are found by true division by the scale
*as it is stored*, and values are narrowed to the tensor's dtype at the end. `scale` multiplies codes back to values.
[Schemes](schemes.md) lists the presets; a scheme of your own is a `TensorScheme`. Rounding is to nearest even, or any
mode of [formats](formats.md#rounding-and-overflow); stochastic rounding takes a seed (and `random_bits`) and draws the
same bits on every machine and in every backend.

Codes under a scale saturate. Numbers without a scale overflow as IEEE 754 says, to Inf, else NaN, where the format has
one; `overflow="torch"` (or `saturate`, `ml_dtypes`, `te`) names another rule. A group with NaN or Inf becomes NaN as a
whole, and no other group is the worse for it.

## Scales

Which numbers share a scale: `tensor`, `row`, `group(n)`, `block(rows, columns)`. How it follows from them
(`Scaling(rule=…)`), with amax = max |x| of the group, and max and emax the largest code and its exponent:

| rule | scale | who has it |
| --- | --- | --- |
| `amax` | amax / max | compressed-tensors, AWQ, GPTQ, QLoRA |
| `percentile` | the given percentile of \\|x\\| / max | observers of post-training quantisation |
| `mse` | the share of amax that leaves the least squared error | the same |
| `ocp_floor` | 2^(floor(log2 amax) − emax) | OCP Microscaling 1.0 |
| `round_up` | amax / max, up to a power of two | NVIDIA's MXFP8; torchao calls it RCEIL |
| `power_of_two`, `margin=0` | the same from max / amax | Transformer Engine's block scaling |
| `power_of_two`, `margin=m` | m powers of two more | MS-AMP |
| `amax`, `tensor_scale=True` | block scales in units of one tensor scale | NVFP4: 448 · 6 |

A scale is rounded to the format in which it is stored before codes are computed. Scales from earlier steps (Transformer
Engine's delayed scaling: history, margin, amax by maximum or most recent, an exchange between processes) are
`quantize.DelayedScaling`; its `fake_quantize` reads a tensor once and records its amax on the way. Transformer Engine's
current scaling and MS-AMP's per-tensor scale are `quantize.delayed_scaling.current_inv_scale` and
`power_of_two_inv_scale`.

## Which kernel runs

Four backends do the same arithmetic, equal bit for bit:

{backends}

`bitwright.quantize.select` names the one that runs and the reason, which goes to the log once. CPU kernels are compiled
when they are first called, for some seconds, and kept on disk beside the sources (or in `NUMBA_CACHE_DIR`); the command
line says so while it waits. They use as many threads as torch does. {gpu_sentence()}

The verbs are torch operators (`torch.ops.bitwright.*`) with shape functions: `torch.compile(fullgraph=True)` and
`torch.export` leave them whole, and the compiled program gives the same numbers. Gradients pass straight through
rounding. In a process that was forked, kernels work on one thread; torch's own operations on several threads hang
there, so that a worker which is forked by hand calls `torch.set_num_threads(1)` first (a DataLoader's workers do).

## Exact

Every one of the 2^32 fp32 numbers, and every bf16 and fp16 number, rounded to nearest even by the `cpu` and `torch`
backends and compared bit for bit (NaN = NaN, −0 ≠ +0) with an outside library, under every overflow rule that it can
judge: differing results of results compared. The reference rounds every number within 2^12 of a change of the result,
and every 2^8th of the others. One difference is known and counted by itself: ml_dtypes takes a negative NaN into FP6
and FP4 to +0, bitwright to −0.

{exactness_table()}

In the test suite, a million inputs per format (all exponents, all ties, both neighbours of every boundary) go through
the same comparison, and one suite holds every backend to the reference: −0, subnormals, all-NaN and all-zero blocks,
short last blocks, non-contiguous and empty tensors.

## At the speed of memory

*n* × is the time of the other way over ours, both measured in turn in one run: at 1 × we are as fast as it. Against
memcpy the other way is torch's `copy_` of the same array into memory that is there, on all threads; bold is below what
the project asks for.

{speed_tables()}

An array of 64 Mi numbers lies in memory; one of 1 Mi lies in the caches of this processor, where a copy runs five times
as fast and arithmetic sets the pace. What each step costs there is in the [log](log.md).

## A checkpoint's magnitudes

`bitwright formats histogram` streams a checkpoint and holds its values against the range of every format. Without
`--scaled` it shows why weights of this size need a scale in 8 bits and below:

```text
$ bitwright formats histogram model.safetensors
file        model.safetensors
values      1,048,576 in 4 tensors; no NaN, Inf or 0
magnitudes  largest 0.0952, smallest but 0 2.15e-8, rms 0.0200

                                                                       fp8   fp8   fp6   fp4
 from     share                                            bf16  fp16  e5m2  e4m3  e3m2  e2m1
─────────────────────────────────────────────────────────────────────────────────────────────
 2^-4    0.19 %  ▎                                          █     █     █     █     ▒     0
 2^-5    11.7 %  ██████████████▊                            █     █     █     █     *     0
 2^-6    31.6 %  ████████████████████████████████████████   █     █     █     █     0     0
 2^-7    26.1 %  █████████████████████████████████          █     █     █     *     0     0
 2^-8    14.8 %  ██████████████████▊                        █     █     █     ▒     0     0
 2^-9    7.75 %  █████████▊                                 █     █     █     ▒     0     0
2^-10    3.90 %  ████▉                                      █     █     █     *     0     0
2^-11    1.95 %  ██▌                                        █     █     █     0     0     0
2^-12    0.97 %  █▎                                         █     █     █     0     0     0
 …
█ full precision   ▒ subnormal   0 rounds to 0   > too large   * mixed

format        largest       → 0  subnormal  too large  signal/noise
───────────────────────────────────────────────────────────────────
bf16      3.38953e+38         0          0          0         exact
fp16            65504  < 0.01 %     0.24 %          0      155.3 dB
fp8_e5m2        57344    0.03 %     0.18 %          0       25.5 dB
fp8_e4m3          448    3.92 %     49.6 %          0       29.6 dB
fp6_e3m2           28    88.3 %     11.7 %          0        1.7 dB
fp4_e2m1            6   100.0 %          0          0        0.0 dB
shares of the finite values; noise of rounding to nearest, the too large held at the largest
```

{histogram_table()}
"""
