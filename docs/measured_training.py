"""Tables on training: policies and where they run, and what benchmarks/training/ has measured.

Figures are those of benchmarks/results/training-*.json; a plot stands beside its table once it has been drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from measured import RESULTS, filed, markdown_table, missing, result

from bitwright import hardware
from bitwright.training.choose import choose_policy, why_not
from bitwright.training.policy import POLICIES
from bitwright.training.policy_bits import state_bits

#: Devices of the table of policies, oldest first.
_DEVICES = ("v100-sxm2", "a100-sxm", "h100-sxm", "b200", "mi300x", "mi355x")


def policies_table() -> str:
    """Every policy: what it is, and the bytes of a parameter under AdamW."""
    rows = []
    for name, policy in POLICIES.items():
        bits = state_bits(policy)
        parameters = policy.parameters if policy.update == "fp32" else f"{policy.parameters}, {policy.update}"
        aliases = ", ".join(f"`{alias}`" for alias in policy.aliases)
        rows.append((f"`{name}`", policy.description, parameters, f"{bits.bytes_per_parameter:g}", aliases))
    return markdown_table(("policy", "what it is", "weights", "bytes:", "also called"), rows)


def native_policies_table() -> str:
    """Which policies devices run natively, and which of them `auto` takes."""
    devices = [hardware.get(name) for name in _DEVICES]
    rows = [
        (f"`{name}`", *("yes" if why_not(policy, device) is None else "" for device in devices))
        for name, policy in POLICIES.items()
    ]
    rows.append(("`auto` takes", *(f"`{choose_policy(device).policy.name}`" for device in devices)))
    return markdown_table(("policy", *(device.name for device in devices)), rows)


def three_am_table() -> str:
    """Who lived, and what formats would have made of the gradients."""
    results = result("training-three-am.json")
    if results is None:
        return missing("benchmarks/training/three_am.py")
    rows = []
    for policy, point in results["points"].items():
        died = point["died_at"]
        loss = "–" if point["validation_loss"] is None else f"{point['validation_loss']:.4f}"
        end = f"NaN from step {died} on" if died is not None else "alive"
        rows.append((policy, end, str(point.get("skipped", "–")), loss))
    table = markdown_table(("run", "end", "steps skipped:", "validation loss:"), rows)
    looked_at = results["points"].get("bf16-mixed")
    shares = "" if looked_at is None else f"\n\n{_shares_table(looked_at['ranges'], looked_at['largest_outputs'])}"
    return _filed(f"{table}{shares}", results, "three-am")


def _shares_table(ranges: Sequence[Mapping[str, Any]], outputs: Sequence[float]) -> str:
    """What formats would have flushed of gradients; then how far outputs of layers reached."""
    found = {(row["gradients_of"], row["format"], tuple(row["steps"])): row for row in ranges}
    periods = sorted({steps for _, _, steps in found})
    rows = []
    for kind, format in dict.fromkeys((kind, format) for kind, format, _ in found):
        own = [found[kind, format, period] for period in periods]
        subnormal, overflowed = (max(row[name] for row in own) for name in ("subnormal", "overflowed"))
        shares = (_percent(row["flushed"]) for row in own)
        rows.append((f"gradients of {kind}, {format}: flushed", *shares, _percent(subnormal), _percent(overflowed)))
    rows.append(("largest output of a linear layer", *(f"{largest:,.0f}" for largest in outputs), "", ""))
    titles = (f"steps {first} to {last}:" for first, last in periods)
    return markdown_table(("", *titles, "subnormal, most:", "overflowed, most:"), rows)


def swallowed_table() -> str:
    """Updates that rounded to nothing, and what the runs came to."""
    results = result("training-swallowed.json")
    if results is None or "summary" not in results:
        return missing("benchmarks/training/swallowed_updates.py")
    rows = []
    for row in results["summary"]:
        shares = row["swallowed"]
        loss = "died" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        columns = (_percent(shares[name]) if name in shares else "–" for name in ("weights", "decay", "exp_avg_sq"))
        rows.append((row["model"], f"`{row['policy']}`", str(row["runs"]), *columns, loss))
    titles = (
        "model", "policy", "runs:", "updates swallowed:", "decay by itself:", "second moments:", "validation loss:",
    )  # fmt: skip
    return _filed(markdown_table(titles, rows), results, "swallowed", plot=True)


def small_steps_table() -> str:
    """Decay, averages and second moments by themselves."""
    results = result("training-swallowed.json")
    if results is None:
        return missing("benchmarks/training/swallowed_updates.py")
    rows = []
    for key, point in results["points"].items():
        part, _, kept = key.partition(" ")
        if part not in _SMALL_STEPS:
            continue
        exact = f"{point['exact'][-1]:.4g}" if "exact" in point else "–"
        share = point.get("share_swallowed")
        rows.append(
            (_SMALL_STEPS[part], kept, f"{point['final']:.4g}", exact, "–" if share is None else _percent(share))
        )
    titles = ("what", "kept in", "came to:", "in real numbers:", "steps swallowed:")
    return _filed(markdown_table(titles, rows), results, "swallowed", plot=False)


_SMALL_STEPS = {
    "decay": "weights that only decay, of their start",
    "average": "an average of 1.5 that began at 1",
    "moment": "a second moment after a burst",
}


def parity_table() -> str:
    """Validation loss over fp32's: mean and interval, by policy and model."""
    results = result("training-parity.json")
    if results is None or not results.get("summary"):
        return missing("benchmarks/training/parity.py")
    found = {(row["policy"], row["model"]): row for row in results["summary"]}
    models = list(dict.fromkeys(model for _, model in found))
    rows = []
    for policy in dict.fromkeys(policy for policy, _ in found):
        own = [found.get((policy, model)) for model in models]
        limit = next((row["limit"] for row in own if row is not None), None)
        cells = [_difference(row) for row in own]
        rows.append((f"`{policy}`", *cells, "" if limit is None else f"≤ {100 * limit:g} %"))
    counts = {row["model"]: row["pairs"] for row in results["summary"]}
    titles = ("policy", *(f"{model}, {counts[model]} pairs:" for model in models), "upper end wanted:")
    return _filed(markdown_table(titles, rows), results, "parity")


def _difference(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    if row.get("died"):
        return "**died**"
    low, high = (f"{100 * end:+.2f}" for end in row["interval"])
    text = f"{100 * row['mean']:+.2f} % [{low}, {high}]"
    return f"**{text}**" if row["is_met"] is False else text


def choice_table() -> str:
    """Every policy: what it takes, loses and comes to."""
    results = result("training-choice.json")
    if results is None or "summary" not in results:
        return missing("benchmarks/training/choice.py")
    summary = results["summary"]
    devices = list(dict.fromkeys(device for row in summary for device in row["peak_tflops"]))
    rows = []
    for row in summary:
        loss = "–" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
        peaks = (f"{row['peak_tflops'][name]:,.0f}" if name in row["peak_tflops"] else "" for name in devices)
        rows.append(
            (
                row["policy"],
                f"{row['bytes_per_parameter']:g} + {row['bytes_of_copies']:.3g}",
                f"{min(row['smallest']):.1e} to {max(row['largest']):.1e}",
                _percent(row["lost_gradients"]),
                f"{row['failed']} of {row['runs']}",
                str(row["skipped_steps"]),
                loss,
                f"{row['step_over_fp32']:.2f} ×",
                *peaks,
            )
        )
    titles = (
        "policy", "bytes a parameter:", "range:", "gradients lost:", "runs failed:", "steps skipped:",
        "validation loss:", "step here, of fp32's:", *(f"{name}, TFLOP/s:" for name in devices),
    )  # fmt: skip
    return _filed(markdown_table(titles, rows), results, "choice")


def cost_table() -> str:
    """CPU seconds of a step over those of what it is set against."""
    results = result("training-cost.json")
    if results is None or not results.get("summary"):
        return missing("benchmarks/training/cost.py")
    rows = []
    for row in results["summary"]:
        low, high = row["interval"]
        ratio = f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        judged = f"**{ratio}**" if row.get("is_met") is False else ratio
        equal = ("yes" if row["losses_equal"] else "no") if row["part"] != "fp8" else ""
        limit = "" if "limit" not in row else f"≤ {row['limit']:g}"
        step = f"{1e3 * row['first_step_cpu_s']:.0f} ms"
        rows.append((row["setup"], _COMPARED[row["part"]], str(row["pairs"]), equal, step, judged, limit))
    over = "CPU seconds of the first over those of the second:"
    titles = ("model", "compared", "pairs:", "losses equal bit for bit", "step of the second:", over, "wanted:")
    return _filed(markdown_table(titles, rows), results, "cost")


_COMPARED = {
    "autocast": "`bf16-mixed`, plain autocast",
    "noise": "plain autocast, plain autocast",
    "fp8": "`fp8-hybrid` emulated, `bf16-mixed`",
}


def adapters_table() -> str:
    """Adapters against full fine-tuning."""
    results = result("training-lora.json")
    if results is None or not results.get("table"):
        return missing("benchmarks/training/lora.py")
    rows = [
        (
            row["variant"],
            f"{row['trained'] / 1e6:,.1f} M",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['predicted_peak_bytes'] / 2**20:,.0f} MiB",
            "" if row["memory_over_full"] is None else f"{row['memory_over_full']:.2f} ×",
            "" if row["time_over_full"] is None else f"{row['time_over_full']:.2f} ×",
            f"{row['loss_before']:.3f} → {row['loss_after']:.3f}",
        )
        for row in results["table"]
    ]
    titles = ("", "trained:", "peak:", "predicted:", "of full's:", "CPU seconds, of full's:", "validation loss:")
    return _filed(markdown_table(titles, rows), results, "lora", plot=False)


def products_table() -> str:
    """What emulated products of codes cost in whole steps."""
    results = result("training-products.json")
    if results is None:
        return missing("benchmarks/training/products.py")
    rows = [
        (
            name,
            f"{row['step_s']:.2f} s",
            f"{row['ratio_to_bf16']:.2f} × [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}]",
            f"{row['processor_ratio_to_bf16']:.2f} ×",
            f"{row['kept_bytes'] / 2**20:,.0f} MiB",
        )
        for name, row in results["recipes"].items()
    ]
    titles = ("products", "a step:", "of bf16's:", "CPU seconds of bf16's:", "kept for the backward pass:")
    shape = f"{results['sequences']} × {results['length']} tokens a step"
    threads = f"{results['threads']} thread{'s' if results['threads'] > 1 else ''}"
    return filed(markdown_table(titles, rows), results, "training-products.json", threads, shape)


def _filed(table: str, results: Mapping[str, Any], part: str, *, plot: bool = True) -> str:
    name = f"training-{part}"
    threads = f"{results['threads']} thread{'s' if results['threads'] > 1 else ''}"
    text = filed(table, results, f"{name}.json", threads)
    drawn = RESULTS / f"{name}.svg"
    return f"![{part}](../benchmarks/results/{drawn.name})\n\n{text}" if plot and drawn.exists() else text


def _percent(share: float) -> str:
    """Two significant digits; shares that are there, but round to nothing, say so."""
    value = 100 * share
    if 0 < value < 0.001:
        return "< 0.001 %"
    return f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
