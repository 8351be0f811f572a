"""Tables on communication: what algorithms and formats come to, and what was measured of sums, times and predictions.

Figures are those of benchmarks/results/; algorithms, closed forms and formats are read off the catalogs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from measured import RESULTS, filed, markdown_table, missing, result

from bitwright.comms import ALGORITHMS, WIRE_FORMATS, algorithms_of, safe_ranks
from bitwright.comms.closed_forms import CLOSED_FORMS
from bitwright.comms.collectives import COLLECTIVES

MIB = 1 << 20
#: Algorithms whose sums are told apart, and what they are called.
_SUMS = {"ring": "ring", "tree": "tree", "two_shot": "two-shot"}
#: The most ranks that the law is asked for.
_MOST_RANKS = 65_536
#: Part of comm-accuracy.json → what it is, which error the project wants small, and how small.
_PARTS: dict[str, tuple[str, str, float | None]] = {
    "training": ("training steps", "median", 0.10),
    "memory": ("memory of training", "mean", 0.10),
    "gemm": ("matrix products", "mean", 0.10),
    "decode": ("decoding, time of a token", "mean", 0.12),
    "prefill": ("prefill", "mean", None),
}
#: End of a part's name → by which rule it is calibrated.
_RULES = {"": "device", "-per-source": "source"}
#: Lines of comm-accuracy.json: all rows, and those that no figure of a device was fitted to.
_ALL, _APART = "all", "all, sweeps of the devices' figures left out"
#: What the network's predictions may be off by, from 1 MiB on, and of exposed time.
_MAX_ERROR, _MAX_EXPOSED_ERROR = 0.15, 0.20


# --- what exists ------------------------------------------------------------------------------------------------------


def closed_forms_table() -> str:
    """Steps and bytes of every collective by every algorithm."""
    rows = []
    for op in COLLECTIVES:
        for name in algorithms_of(op):
            form = CLOSED_FORMS[op, name]
            rows.append((f"`{op}`", f"`{name}`", form.spelled_steps, form.spelled_busiest))
    return markdown_table(("collective", "algorithm", "steps", "sent by the busiest rank"), rows)


def algorithms_table() -> str:
    """What each algorithm does."""
    rows = [(f"`{name}`", algorithm.description, algorithm.source) for name, algorithm in ALGORITHMS.items()]
    return markdown_table(("algorithm", "what it does", "source"), rows)


def formats_table() -> str:
    """What a number weighs on the wire, and up to how many ranks its sums are as good as a bf16 number."""
    rows = []
    for name, wire in WIRE_FORMATS.items():
        most = (safe_ranks(name, algorithm) for algorithm in _SUMS)
        rows.append((f"`{name}`", f"{wire.bits_per_number:g}", *map(_spell_ranks, most)))
    return markdown_table(("format", "bits a number:", *(f"{title}:" for title in _SUMS.values())), rows)


def _spell_ranks(count: int) -> str:
    if count == 1:
        return "none"
    return "any" if count >= _MOST_RANKS else f"{count:,}"


# --- precision on the wire --------------------------------------------------------------------------------------------


def growth_table() -> str:
    """Errors of sums as ranks grow."""
    results = result("wire-error.json")
    if results is None:
        return missing("benchmarks/wire_error.py")
    found = {(row["format"], row["algorithm"], row["ranks"]): row["error"] for row in results["growth"]}
    ranks = sorted({count for _, _, count in found})
    rows = [
        (f"`{format}`", f"`{name}`", *(_percent(found.get((format, name, count))) for count in ranks))
        for format, name in dict.fromkeys((format, name) for format, name, _ in found)
    ]
    titles = ("format", "algorithm", *(f"{count:,} ranks:" for count in ranks))
    return _pictured(_from(markdown_table(titles, rows), "wire-error.json"), "wire-error.svg")


def feedback_table() -> str:
    """What the mean over steps is off by, without and with what rounding lost before."""
    results = result("wire-error.json")
    if results is None:
        return missing("benchmarks/wire_error.py")
    found = {(row["format"], row["feedback"], row["steps"]): row["error"] for row in results["feedback"]}
    steps = sorted({count for _, _, count in found})
    rows = [
        (
            f"`{format}`",
            _percent(found[format, False, steps[-1]]),
            *(_percent(found[format, True, count]) for count in steps),
        )
        for format in dict.fromkeys(format for format, _, _ in found)
    ]
    titles = ("format", f"without, {steps[-1]:,} steps:", *(f"with, {_plural(count, 'step')}:" for count in steps))
    return _from(markdown_table(titles, rows), "wire-error.json")


# --- predictions ------------------------------------------------------------------------------------------------------


def collectives_table() -> str:
    """Predicted times of collectives against published ones."""
    results = result("collective-accuracy.json")
    if results is None:
        return missing("benchmarks/collective_accuracy.py --write")
    rows = [
        (
            row["sizes"],
            rule,
            str(row["rows"]),
            _judged(row["mean_error"], row["target"]),
            _share(row["median_error"]),
            _share(row["as_the_file_is"]),
            _share(row["roofline"]),
            f"≤ {100 * row['target']:g} %",
        )
        for rule, bands in (("log", results["bands"]), ("source", results["per_source"]))
        for row in bands
    ]
    titles = (
        "size", "calibrated by", "rows:", "mean error:", "median:", "not calibrated:", "roofline:", "mean wanted:",
    )  # fmt: skip
    return _from(markdown_table(titles, rows), "collective-accuracy.json")


def parts_table() -> str:
    """Predictions of steps, products, memory and tokens against published ones."""
    results = result("comm-accuracy.json")
    if results is None:
        return missing("benchmarks/comm_accuracy.py --json")
    rows = []
    for part, (title, judged, most) in _PARTS.items():
        for end, rule in _RULES.items():
            found = results[part + end]
            lines = {line["group"]: line for line in found["groups"]}
            line = lines.get(_APART, lines[_ALL])
            wanted = "" if most is None else f"{judged} ≤ {100 * most:g} %"
            left = str(len(found["left_out"]))
            rows.append((title, rule, *_errors(line, judged if most else None, most), left, wanted))
    titles = ("what", "calibrated by", *_ERROR_TITLES, "left out:", "wanted")
    return _from(markdown_table(titles, rows), "comm-accuracy.json")


def out_of_memory_sentence() -> str:
    """How many runs that ran out of memory are named."""
    results = result("comm-accuracy.json")
    if results is None:
        return missing("benchmarks/comm_accuracy.py --json")
    found = results["out-of-memory"]
    is_met = found["verdicts"][0]["is_met"]
    share = f"{100 * found['share']:.0f} %"
    return (
        f"Of {found['ran_out']} published runs that ran out of memory, {found['named']} are said to "
        f"({share if is_met else f'**{share}**'}; wanted: 90 %); of {found['ran']} that ran and calibrated nothing, "
        f"{found['said_to_fit']} are said to fit."
    )


def beside_table() -> str:
    """Work beside collectives: published times against both_s."""
    results = result("comm-accuracy.json")
    if results is None:
        return missing("benchmarks/comm_accuracy.py --json")
    rows = [
        (line["group"], str(line["rows"]), _share(line["mean"]), _share(line["constant_mean"]),
         _share(line["roofline_mean"]))
        for line in results["overlap"]["groups"]
    ]  # fmt: skip
    titles = ("source, device, what", "rows:", "mean error:", "nothing hidden:", "all hidden:")
    return _from(markdown_table(titles, rows), "comm-accuracy.json")


def sources_table() -> str:
    """Training steps by source."""
    results = result("comm-accuracy.json")
    if results is None or "training-per-source" not in results:
        return missing("benchmarks/comm_accuracy.py --json")
    lines = [line for line in results["training-per-source"]["groups"] if line["fresh"]]
    rows = [(line["group"], *_errors(line)) for line in lines]
    return _from(markdown_table(("source", *_ERROR_TITLES), rows), "comm-accuracy.json")


_ERROR_TITLES = ("rows:", "mean error:", "median:", "worst:", "constant share:", "best constant:", "roofline:")


def _errors(line: Mapping[str, Any], judged: str | None = None, most: float | None = None) -> tuple[str, ...]:
    """The cells of a line of comm-accuracy.json."""
    ours = (_judged(line[name], most if name == judged else None) for name in ("mean", "median", "worst"))
    others = (_share(line[name]) for name in ("constant_mean", "constant_best", "roofline_mean"))
    return (str(line["fresh"]), *ours, *others)


# --- a network with known limits --------------------------------------------------------------------------------------


def network_table() -> str:
    """Schedules between real processes: measured, predicted from curves fitted beside them, and where they cross."""
    results = result("network.json")
    if results is None:
        return missing("benchmarks/network/run.py")
    parts = [_one_network(cluster) for cluster in results["clusters"]]
    return filed("\n\n".join(parts), results, "network.json")


def _one_network(cluster: Mapping[str, Any]) -> str:
    curves = "; ".join(
        f"{curve['level']}, `{curve['op']}`: {1e3 * curve['latency_s']:.2f} ms, "
        f"{1e3 * curve['gb_per_s_of_a_rank']:.1f} MB/s a rank, half at {curve['half_size_bytes'] / 1024:.0f} KiB"
        for curve in cluster["curves"]
    )
    large = {(row["op"], row["algorithm"], row["num_bytes"]): row for row in cluster["rows"] if row["num_bytes"] >= MIB}
    sizes = sorted({size for _, _, size in large})
    rows = [
        (f"`{op}`", f"`{name}`", *(_timed(large.get((op, name, size))) for size in sizes))
        for op, name in dict.fromkeys((op, name) for op, name, _ in large)
    ]
    titles = ("collective", "algorithm", *(f"{size / MIB:g} MiB:" for size in sizes))
    text = f"{cluster['title']} ({curves}):\n\n{markdown_table(titles, rows)}"
    crossings = [
        (f"`{row['to']}` beats `{row['from']}`", _crossing(row, "measured"), _bold(row, _crossing(row, "predicted")))
        for row in cluster["crossings"]
    ]
    if crossings:
        text += f"\n\n{markdown_table(('all-reduce', 'measured:', 'predicted:'), crossings)}"
    met = sum(verdict["is_met"] for verdict in cluster["verdicts"])
    return f"{text}\n\nMet: {met} of {len(cluster['verdicts'])} algorithms and crossings."


def _timed(row: Mapping[str, Any] | None) -> str:
    """A measured time, and what the prediction is off by."""
    if row is None:
        return "–"
    error = row["predicted_s"] / row["measured_s"] - 1
    return f"{1e3 * row['measured_s']:,.0f} ms, {_off(error, _MAX_ERROR)}"


def _crossing(row: Mapping[str, Any], word: str) -> str:
    size = row[f"{word}_bytes"]
    return f"from {size / MIB:.2f} MiB" if size else f"`{row[f'{word}_faster']}` throughout"


def _bold(row: Mapping[str, Any], text: str) -> str:
    return text if row["is_met"] else f"**{text}**"


def overlap_table() -> str:
    """What an exchange adds to a backward pass: measured, and predicted."""
    results = result("network-overlap.json")
    if results is None:
        return missing("benchmarks/network/overlap.py")
    rows = []
    for row in results["rows"]:
        rows.append(
            (
                f"{row['bucket_bytes'] / MIB:g} MiB" if row["overlap"] else "after the pass",
                str(row["micro_batches"]),
                f"{1e3 * row['alone_s']:,.0f} ms",
                f"{1e3 * row['time_s']:,.0f} ms",
                f"{1e3 * row['exposed_s']:,.0f} ms",
                f"{1e3 * row['predicted_s']:,.0f} ms",
                _off(row["predicted_s"] / row["exposed_s"] - 1, _MAX_EXPOSED_ERROR),
            )
        )
    titles = ("buckets", "micro-batches:", "passes alone:", "with exchange:", "exposed:", "predicted:", "off by:")
    return _pictured(filed(markdown_table(titles, rows), results, "network-overlap.json"), "network-overlap.svg")


# --- words ------------------------------------------------------------------------------------------------------------


def _from(table: str, name: str) -> str:
    return f"{table}\n\nFrom `benchmarks/results/{name}`."


def _pictured(text: str, name: str) -> str:
    """The same below its picture, once that has been drawn."""
    title = name.partition(".")[0]
    return f"![{title}](../benchmarks/results/{name})\n\n{text}" if (RESULTS / name).exists() else text


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _judged(value: float | None, most: float | None) -> str:
    """A share, bold where it is above what is wanted."""
    text = _share(value)
    return f"**{text}**" if value is not None and most is not None and value > most else text


def _off(error: float, most: float) -> str:
    text = f"{100 * error:+.1f} %"
    return f"**{text}**" if abs(error) > most else text


def _percent(share: float | None) -> str:
    """Two significant digits, however small."""
    if share is None:
        return "–"
    value = 100 * share
    return f"{value:.1e} %" if value < 1e-3 else f"{value:#.2g} %" if value < 9.95 else f"{value:.0f} %"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
