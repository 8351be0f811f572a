"""Tables of what running plans was measured to take: benchmarks/results/inference-*.json, each a part of one script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from measured import filed, markdown_table, missing, result


def products_table() -> str:
    """Products with packed weights against torch's bf16, by scheme and shape."""
    results = result("inference-matmul.json")
    if results is None:
        return _missing("matmul")
    found = {(row["scheme"], tuple(row["shape"]), row["tokens"]): row for row in results["products"]}
    tokens = sorted({number for _, _, number in found})
    rows = []
    for scheme, shape in dict.fromkeys((scheme, shape) for scheme, shape, _ in found):
        own = {number: found[scheme, shape, number] for number in tokens if (scheme, shape, number) in found}
        one = own[min(own)]
        ratios = [_ratio(own[number]["ratio"], own[number]["target"]) if number in own else "–" for number in tokens]
        times = f"{one['packed_ms']['median_ms']:.2f} ms", f"{one['gb_per_s']:.1f}", _percent(one["share_of_reading"])
        rows.append((f"`{scheme}`", _shape(shape), *ratios, *times))
    counts = (f"{number} token{'s' if number > 1 else ''}:" for number in tokens)
    titles = ("scheme", "weight", *counts, f"time at {tokens[0]}:", "GB/s:", "of reading:")
    return _filed(titles, rows, results, "matmul")


def processors_table() -> str:
    """The same products on what other processors have."""
    results = result("inference-processors.json")
    if results is None:
        return _missing("processors")
    found = {(row["processor"], row["scheme"], row["tokens"]): row for row in results["products"]}
    tokens = sorted({number for _, _, number in found})
    rows = []
    for processor, scheme in dict.fromkeys((processor, scheme) for processor, scheme, _ in found):
        own = [found[processor, scheme, number] for number in tokens]
        ratios = [f"{row['ratio']:.2f} ×, {row['ratio_of_fp32']:.2f} ×" for row in own]
        rows.append((processor, f"`{scheme}`", *ratios, f"{own[0]['packed_ms']['median_ms']:.2f} ms"))
    counts = (f"{number} token{'s' if number > 1 else ''}:" for number in tokens)
    return _filed(("processor", "scheme", *counts, f"time at {tokens[0]}:"), rows, results, "processors")


def decode_table() -> str:
    """Whole models, token by token."""
    results = result("inference-decode.json")
    if results is None:
        return _missing("decode")
    rows = [
        (
            row["model"],
            row["plan"],
            f"{row['decode_tokens_per_s']:.1f}",
            _ratio(row["decode_ratio"], row["decode_target"]),
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['prefill_ratio']:.2f} ×",
            f"{row['weight_bytes'] / 2**20:.0f} MiB",
            f"{row['packed_bytes_over_plan']:+.2%}".replace("%", " %") if "packed_bytes_over_plan" in row else "",
        )
        for row in results["rows"]
    ]
    titles = (
        "model", "plan", "decode, tokens/s:", "of bf16's:", "prefill, tokens/s:", "of bf16's:", "weights:",
        "codes over the plan's bytes:",
    )  # fmt: skip
    return _filed(titles, rows, results, "decode")


def engines_table() -> str:
    """The same plans in engines and here, token by token."""
    command, name = "benchmarks/engines/decode_speed.py", "engines-decode.json"
    results = result(name)
    if results is None:
        return missing(command)
    programs = list(dict.fromkeys(program for row in results["rows"] for program in row["decode_tokens_per_s"]))
    rows = []
    for row in results["rows"]:
        found = row["decode_tokens_per_s"]
        rows.append(
            (row["plan"], *(f"{found[program]:.1f}" if program in found else "refused" for program in programs))
        )
    titles = ("plan", *(f"{program}, tokens/s:" for program in programs))
    return filed(markdown_table(titles, rows), results, name, f"{results['threads']} threads")


def fp8_table() -> str:
    """What FP8 weights and inputs cost in perplexity."""
    results = result("inference-fp8.json")
    if results is None:
        return _missing("fp8")
    rows = []
    for row in results["perplexity"]:
        increase = ""
        if "increase" in row:
            low, high = (f"{100 * end:+.2f}" for end in row["interval"])
            increase = f"{100 * row['increase']:+.2f} % [{low}, {high}]"
        kept = str(row["sites_kept"]) if "sites_kept" in row else ""
        rows.append((row["plan"], f"{row['perplexity']:.3f}", increase, kept))
    return _filed(("plan", "perplexity:", "over bf16's:", "sites in bf16:"), rows, results, "fp8")


def break_even_table() -> str:
    """At which rate of overflowing calls rounding inputs stops to pay."""
    results = result("inference-fp8.json")
    if results is None:
        return _missing("fp8")
    rows = [
        (
            f"`{row['scheme']}`",
            row["matrix"],
            _shape(row["shape"]),
            str(row["num_tokens"]),
            *(f"{1e6 * row[part]:.0f} µs" for part in ("narrow_s", "wide_s", "few_s")),
            _percent(row["rate"]),
        )
        for row in results["break_even"]
    ]
    titles = ("scheme", "matrix", "weight", "tokens:", "rounded:", "unrounded:", "3 tokens unrounded:", "break-even:")
    return _filed(titles, rows, results, "fp8")


def padding_table() -> str:
    """What filling up to a GPU's multiples costs."""
    results = result("inference-fp8.json")
    if results is None:
        return _missing("fp8")
    rows = [
        (
            _shape(row["shape"]),
            str(row["tokens"]),
            _percent(row["padded_share_of_inputs"]),
            f"{row['as it is (ms)']:.3f} ms",
            f"{row['filled (ms)']:.3f} ms",
        )
        for row in results["padding"]
    ]
    titles = ("weight", "tokens:", "of the inputs is filling:", "as it is:", "filled:")
    return _filed(titles, rows, results, "fp8")


def _missing(part: str) -> str:
    return missing(f"benchmarks/inference.py {part}")


def _filed(titles: Sequence[str], rows: Iterable[Sequence[str]], results: Mapping[str, Any], part: str) -> str:
    threads = f"{results['threads']} thread{'s' if results['threads'] > 1 else ''}"
    return filed(markdown_table(titles, rows), results, f"inference-{part}.json", threads)


def _ratio(ratio: float, target: float | None) -> str:
    """Bold where it is below what the project asks for."""
    return f"**{ratio:.2f} ×**" if target is not None and ratio < target else f"{ratio:.2f} ×"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _shape(shape: Iterable[int]) -> str:
    return " × ".join(map(str, shape))
