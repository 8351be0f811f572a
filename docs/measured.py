"""Tables of what was measured, read from the result files, and the page on quantising tensors around some of them.

Figures are those of benchmarks/results/*.json; what has not been measured yet says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Backends in the order of the table of exactness.
_BACKENDS = ("cpu", "torch", "reference")


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def where_measured(results: Mapping[str, Any]) -> str:
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


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a title that ends in ":" stands over numbers, which are set to the right."""
    head = [title.removesuffix(":") for title in titles]
    rule = ["--:" if title.endswith(":") else "---" for title in titles]
    cells = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def missing(command: str) -> str:
    """What stands in the place of a table."""
    return f"Not measured yet: `python {command}`."


def filed(table: str, results: Mapping[str, Any], name: str, *further: str) -> str:
    """A table, and where its figures are from: the machine, whatever else matters, and the file."""
    where = ", ".join((where_measured(results), *further))
    return f"{table}\n\nMeasured on {where} (`benchmarks/results/{name}`)."


def exactness_table() -> str:
    """How many results were compared, and how many differ, by format and backend."""
    results = result("exhaustive.json")
    if results is None:
        return missing("benchmarks/exhaustive.py")
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
    return filed("\n".join(lines), results, "exhaustive.json")


def speed_tables() -> str:
    """Speed against a memcpy and against other libraries."""
    results = result("quantize.json")
    if results is None:
        return missing("benchmarks/quantize.py")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import rows

    tables = rows.markdown([rows.from_record(record) for record in results["rows"]], results["groups"])
    return filed(tables, results, "quantize.json", f"{results['threads']} threads")


def histogram_table() -> str:
    """Speed and memory of the streamed histogram."""
    results = result("histogram.json")
    if results is None:
        return missing("benchmarks/histogram.py")
    lines = ["| a file of 1 GiB in | read at | whole process | largest memory |", "| --- | --: | --: | --: |"]
    lines += [
        f"| {row['dtype']} | {row['read_gib_per_s']:.2f} GiB/s | {row['process_s']:.2f} s | {row['peak_mib']:.0f} MiB |"
        for row in results["rows"]
    ]
    return filed("\n".join(lines), results, "histogram.json")


def gpu_sentence() -> str:
    """Whether the GPU kernels have run on a GPU."""
    results = result("gpu-check.json")
    if results is None:
        return (
            "The Triton kernels are tested in Triton's interpreter and compiled for NVIDIA GPUs, and have not run on a "
            "GPU yet; `make gpu-check` checks them and measures their speed on one."
        )
    return f"The Triton kernels were checked on a GPU: {where_measured(results)} (`benchmarks/results/gpu-check.json`)."


# --- exporting --------------------------------------------------------------------------------------------------------

#: As in benchmarks/engines: nats that an engine may differ by on average, or so many times the plan's own resolution.
_MAX_LOGPROB, _RESOLUTIONS = 0.02, 1.25


def _is_close(row: Mapping[str, Any]) -> bool:
    limit = max(_MAX_LOGPROB, _RESOLUTIONS * row.get("resolution", 0.0))
    return bool(row["logprob_difference"] <= limit)


def _difference(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Mean difference of log-probabilities, the plan's own resolution, greedy texts that agree."""
    shown = f"{row['logprob_difference']:.4f}"
    agreeing = f"{sum(row['greedy_agrees'])} of {len(row['greedy_agrees'])}"
    own = "–" if "resolution" not in row else "< 0.0001" if row["resolution"] < 1e-4 else f"{row['resolution']:.4f}"
    return shown if _is_close(row) else f"**{shown}**", own, agreeing


def vllm_table() -> str:
    """The real vLLM beside a plan, and what it has no kernel for on this CPU."""
    results = result("vllm.json")
    if results is None:
        return missing("benchmarks/engines/vllm_check.py --results benchmarks/results/vllm.json")
    ran = [row for row in results["rows"] if "error" not in row]
    rows = [
        (
            row["case"],
            row["dtype"],
            *_difference(row),
            f"{row['perplexity']:.2f}",
            f"{row['perplexity_vllm']:.2f}",
        )
        for row in ran
    ]
    titles = ("plan", "dtype", "difference:", "resolution:", "greedy:", "perplexity of the plan:", "in vLLM:")
    refused = ", ".join(f"`{row['case']}`" for row in results["rows"] if "error" in row)
    lacking = f" vLLM had no kernel on this processor for: {refused}." if refused else ""
    return filed(markdown_table(titles, rows), results, "vllm.json") + lacking


def llama_cpp_table() -> str:
    """The real llama.cpp beside a plan."""
    results = result("llama_cpp.json")
    if results is None:
        return missing("benchmarks/engines/llama_cpp_check.py")
    rows = [
        (
            row["case"],
            f"{row['file_bytes'] / 2**20:.1f}",
            *_difference(row),
            f"{row['perplexity']:.2f}",
            f"{row['perplexity_with_its_inputs']:.2f}",
            f"{row['perplexity_llama_cpp']:.2f}",
        )
        for row in results["rows"]
        if "error" not in row
    ]
    titles = (
        "plan", "MiB:", "difference:", "resolution:", "greedy:", "perplexity of the plan:", "inputs rounded:",
        "in llama.cpp:",
    )  # fmt: skip
    gguf = f"gguf {results['machine'].get('gguf', '?')}"
    return filed(markdown_table(titles, rows), results, "llama_cpp.json", gguf)


def torchao_table() -> str:
    """The real torchao beside a plan."""
    results = result("torchao.json")
    if results is None:
        return missing("benchmarks/engines/torchao_check.py")
    rows = [
        (row["case"], f"{row['equal_layers']} of {row['layers']}", f"{row['logit_difference']:.2g}")
        for row in results["rows"]
        if "error" not in row
    ]
    titles = ("plan", "layers equal bit for bit:", "logits, relative difference:")
    return filed(markdown_table(titles, rows), results, "torchao.json")


# --- beside other tools ----------------------------------------------------------------------------------------------


def peers_table(model: str) -> str:
    """KL of each tool at the same bits, on one model and text."""
    results = result(f"peers-{model}.json")
    if results is None:
        return missing(f"benchmarks/peers/run.py --model {model}")
    kl = {(run["row"], run["tool"]): run for run in results["runs"]}
    rows, tools = (list(dict.fromkeys(key[part] for key in kl)) for part in (0, 1))
    cells = [(row, *(_kl_of(kl.get((row, tool))) for tool in tools)) for row in sorted(rows)]
    versions = {name: version for run in results["runs"] for name, version in run["versions"].items()}
    peers = ", ".join(f"{name} {versions[name]}" for name in ("nvidia-modelopt", "auto-round") if name in versions)
    text = results["facts"]["text"]
    table = markdown_table(("bits", *(f"{tool}:" for tool in tools)), cells)
    return (
        f"{table}\n\n{results['facts']['what']}; {text['calibration']} of calibration, {text['evaluation']}; {peers}. "
        f"Measured on {where_measured(results)} (`benchmarks/results/peers-{model}.json`)."
    )


def _kl_of(run: Mapping[str, Any] | None) -> str:
    return "–" if run is None else f"{run['kl']:.3g} ± {run['kl_standard_error']:.1g}"


# --- the page on quantising -------------------------------------------------------------------------------------------


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
