"""Rows of measured times, as records of a result file, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing measured."""

    group: str
    what: str
    #: Dtype of the values, and how many there are.
    dtype: str
    num_elements: int
    #: One call: median, least and most of so many.
    ms: float
    min_ms: float
    max_ms: float
    repetitions: int
    #: Bytes that have to be read and written, per second; None where they are not the point.
    gb_per_s: float | None = None
    #: What it ran in turn with, the median of that, and that over `ms`.
    against: str | None = None
    against_ms: float | None = None
    ratio: float | None = None
    #: The least ratio that the project asks for; None for what is told besides.
    target: float | None = None
    #: Time of a `clone()`, in turn as well, over `ms`: for what allocates its result.
    clone_ratio: float | None = None
    #: Share of values that are the peer's.
    same_values: float | None = None
    remark: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None or self.ratio is None else self.ratio >= self.target


def as_record(row: Row) -> dict[str, Any]:
    """What the result file holds; `is_met` is there for readers without this module."""
    return asdict(row) | {"is_met": row.is_met}


def from_record(record: dict[str, Any]) -> Row:
    """Undo `as_record`."""
    return Row(**{key: value for key, value in record.items() if key != "is_met"})


def spell_count(number: int) -> str:
    """A power of two in words of powers of 1024: 64 Mi."""
    for factor, name in ((1 << 20, " Mi"), (1 << 10, " Ki")):
        if number >= factor:
            return f"{number / factor:.4g}{name}"
    return str(number)


def table(rows: Sequence[Row], title: str) -> Table:
    """The rows of one group for the terminal."""
    shown = Table(title=title, title_justify="left")
    for name in ("", "dtype", "values"):
        shown.add_column(name, no_wrap=bool(name))
    for name in ("ms", "least – most", "GB/s", "ratio", "wanted"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("against", "remark"):
        shown.add_column(name)
    for row in rows:
        colour = {None: "default", True: "green", False: "red"}[row.is_met]
        against = "" if row.against is None else f"{row.against}, {row.against_ms:.3g} ms"
        shown.add_row(
            row.what,
            row.dtype,
            spell_count(row.num_elements),
            f"{row.ms:.4g}",
            f"{row.min_ms:.4g} – {row.max_ms:.4g}",
            "" if row.gb_per_s is None else f"{row.gb_per_s:.1f}",
            "" if row.ratio is None else f"[{colour}]{row.ratio}[/{colour}]",
            "" if row.target is None else f"≥ {row.target:g}",
            against,
            _remarks(row),
        )
    return shown


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met, and which are not."""
    judged = [row for row in rows if row.is_met is not None]
    missed = [
        f"{row.what} ({row.dtype}, {spell_count(row.num_elements)}): {row.ratio}" for row in judged if not row.is_met
    ]
    return f"{len(judged) - len(missed)} of {len(judged)} targets are met" + "".join(
        f"\n  not: {one}" for one in missed
    )


def markdown(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """One table per group: a line for each thing, a column for each dtype and size; bold where a target is missed."""
    parts = []
    for group, title in titles.items():
        found = [row for row in rows if row.group == group]
        if not found:
            continue
        sizes = list(dict.fromkeys((row.dtype, row.num_elements) for row in found))
        things: dict[tuple[str, float | None], dict[tuple[str, int], Row]] = {}
        for row in found:
            things.setdefault((row.what, row.target), {})[row.dtype, row.num_elements] = row
        heads = [title, *(f"{dtype}, {spell_count(number)}" for dtype, number in sizes), "wanted"]
        lines = [heads, ["---", *["--:"] * (len(sizes) + 1)]]
        for (what, target), by_size in things.items():
            cells = [_cell(by_size[size]) if size in by_size else "" for size in sizes]
            lines.append([what, *cells, "" if target is None else f"≥ {target:g} ×"])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def _cell(row: Row) -> str:
    ms = f"{row.ms:.3g} ms" if row.ms < 1000 else f"{row.ms / 1000:.3g} s"
    if row.ratio is None:
        return ms
    ratio = f"{row.ratio:.2f} ×" if row.ratio < 10 else f"{row.ratio:.0f} ×"
    return f"{ratio if row.is_met is not False else f'**{ratio}**'} ({ms})"


def _remarks(row: Row) -> str:
    remarks = [row.remark] if row.remark else []
    if row.clone_ratio is not None:
        remarks.append(f"{row.clone_ratio} of clone()")
    if row.same_values is not None and row.same_values < 1:
        remarks.append(f"{row.same_values:.2%} of the values are equal")
    return "; ".join(remarks)
