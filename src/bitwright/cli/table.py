"""A plan as text: site groups × choice × bits × predicted and measured KL, then what it all comes to.

Fits 80 columns, needs no terminal, and treats every name as text (site names contain brackets). Names and numbers are
never cut: a table that needs more room than there is takes it, and the terminal wraps its lines.
"""

from __future__ import annotations

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

from bitwright.plan import EmbeddingFigures, Interval, Measured, Plan
from bitwright.report.comparison_words import say_uniform
from bitwright.report.groups import spell_choice, total_roles
from bitwright.report.limit_words import say_bound, say_limits
from bitwright.report.units import (
    BEFORE_UNIT,
    LIMIT_TITLES,
    spell_bytes,
    spell_count,
    spell_excess,
    spell_interval,
    spell_limit_value,
    spell_number,
    spell_percent,
    spell_seconds,
)

#: Columns that output is laid out for where the terminal has fewer.
_MIN_WIDTH = 80
#: A line under the titles, and nothing else, as `box.SIMPLE_HEAD` draws it.
_ASCII_BOX = box.Box("    \n" * 2 + " -- \n" + "    \n" * 5, ascii=True)
#: To so many columns text is folded before a table grows beyond the terminal.
_FOLDED_WIDTH = 16
#: What stands for the space between a number and its unit while lines are broken.
_HELD = "\uf8ff"
#: More columns than any cell takes.
_ALL_THE_ROOM = 1000


def new_console(*, highlight: bool = True) -> Console:
    """Return a console for stdout, at least 80 columns wide."""
    console = Console(highlight=highlight)
    console.width = max(console.width, _MIN_WIDTH)
    return console


def print_table(console: Console, table: Table) -> None:
    """Print a table, with whatever room its columns that never wrap need."""
    options = console.options.update(width=_ALL_THE_ROOM)
    if table.box is not None and options.ascii_only:
        table.box = _ASCII_BOX
    for column in table.columns:
        if column.no_wrap:
            cells = [cell for cell in (column.header, *column.cells) if cell]
            column.min_width = measure_renderables(console, options, cells).maximum
        else:
            column.max_width = _FOLDED_WIDTH
    needed = Measurement.get(console, options, table).minimum
    for column in table.columns:
        column.max_width = None
    width = console.width
    console.width = max(width, needed)
    console.print(table)
    console.width = width


def new_table(*columns: tuple[str, bool]) -> Table:
    """Return an empty table; each column is (title, is a number). The first column and numbers never wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, (title, is_number) in enumerate(columns):
        table.add_column(
            Text(title),
            justify="right" if is_number else "left",
            no_wrap=is_number or index == 0,
            overflow="fold",
        )
    return table


def print_groups(console: Console, plan: Plan) -> None:
    """Print one line per role and choice, one more where a role has several choices, and the totals."""
    table = new_table(
        ("site group", False),
        ("choice", False),
        ("sites", True),
        ("bits", True),
        ("size", True),
        # Two lines, so that the longest role and choice stand on one line of 80 columns.
        ("KL\npredicted", True),
        ("KL\nmeasured", True),
    )
    for total in total_roles(plan):
        is_mixed = len(total.groups) > 1
        for group in total.groups:
            table.add_row(
                Text(group.role),
                Text(group.choice),
                str(group.num_sites),
                f"{group.bits:.2f}",
                spell_bytes(group.num_bytes),
                spell_number(group.predicted_kl),
                "" if is_mixed else spell_number(total.measured_kl),
            )
        if is_mixed:
            table.add_row(
                Text(total.role),
                Text("together"),
                str(total.num_sites),
                f"{total.bits:.2f}",
                spell_bytes(total.num_bytes),
                spell_number(total.predicted_kl),
                spell_number(total.measured_kl),
            )
    table.add_section()
    table.add_row(
        Text("whole plan", style="bold"),
        "",
        str(len(plan.sites)),
        f"{plan.summary.effective_bits:.2f}",
        spell_bytes(plan.summary.weight_bytes),
        spell_number(plan.summary.predicted_kl),
        spell_number(plan.measured.kl.mean if plan.measured else None),
    )
    print_table(console, table)
    _say(console, f"KL in nats per {plan.kl_unit}. Measured: all sites of one role at once, nothing else.", style="dim")


def print_sites(console: Console, plan: Plan) -> None:
    """Print one line per site, in the order of the model."""
    table = new_table(("site", False), ("choice", False), ("bits", True), ("KL predicted", True))
    for site in plan.sites:
        table.add_row(
            Text(site.name),
            Text(spell_choice(site.scheme, site.rounding, site.transform)),
            f"{site.bits:.2f}",
            spell_number(site.predicted_kl),
        )
    print_table(console, table)


def print_summary(console: Console, plan: Plan) -> None:
    """Print what the plan comes to: sizes, measurements, limits, repairs, notes."""
    rows = [
        ("model", f"{plan.model.name}, {plan.model.params:,} parameters"),
        ("hardware", f"{plan.hardware} ({plan.hardware_reason})" if plan.hardware_reason else plan.hardware),
        *((("engine", plan.options.engine),) if plan.options and plan.options.engine else ()),
        (
            "weights",
            f"{spell_bytes(plan.summary.weight_bytes)} ({spell_bytes(2 * plan.model.params)} in 16 bits), "
            f"{plan.summary.effective_bits:.3f} effective bits, {plan.summary.nominal_bits:.3f} nominal",
        ),
    ]
    if plan.measured is not None:
        rows += measured_rows(plan.measured)
    elif plan.budget.limits:
        rows.append(("KL", f"{spell_number(plan.summary.predicted_kl)} nats per {plan.kl_unit}, predicted only"))
    else:  # nothing was asked for, so nothing was searched
        rows.append(("KL", "neither predicted nor measured: bitwright verify measures it"))
    rows += _workload_rows(plan)
    rows.append(
        ("objective", f"{plan.objective} ({plan.objective_reason})" if plan.objective_reason else plan.objective)
    )
    rows += [
        ("repaired", f"{repair.site}: {repair.from_scheme} → {repair.to_scheme}, {repair.why}")
        for repair in plan.repairs
    ]
    rows += [("compared", say_uniform(plan.summary.weight_bytes, found)) for found in plan.uniform]
    if plan.ruled_out:
        first = plan.ruled_out[0]
        more = len(plan.ruled_out) - 1
        rest = f"; {more} more {'reason' if more == 1 else 'reasons'} in the report" if more else ""
        rows.append(("ruled out", f"{first.scheme} at {spell_count(first.sites, 'site')}: {first.reason}{rest}"))
    rows += [("limits", sentence) for sentence in say_limits(plan)]
    rows += [("note", note) for note in (*plan.model.notes, *plan.notes)]
    print_rows(console, rows)
    print_limits(console, plan)


def _workload_rows(plan: Plan) -> list[tuple[str, str]]:
    """What has to fit on the device, and how long a step takes."""
    rows = []
    workload, memory, latency = plan.workload, plan.device_memory, plan.latency
    if memory is not None:
        parts = ("weights", "kv_cache", "activations", "workspace")
        listing = ", ".join(f"{part.replace('_', ' ')} {spell_bytes(getattr(memory, part))}" for part in parts)
        load = f"{workload.batch} × {spell_count(workload.context or 0, 'token')}"
        rows.append(("on the device", f"{spell_bytes(memory.total)} for {load}: {listing}"))
    if latency is not None:
        rate = workload.batch / latency.decode_s_per_token if latency.decode_s_per_token > 0 else 0.0
        batch = "" if workload.batch == 1 else f" for {workload.batch} sequences ({spell_number(rate)} tokens/s)"
        rows.append(
            (
                f"time ({latency.status}{', at measured rates' if latency.rates == 'achieved' else ''})",
                f"{spell_seconds(latency.decode_s_per_token)} a token{batch}; prefill of {latency.prefill_tokens} "
                f"tokens {spell_seconds(latency.prefill_s)}",
            )
        )
    return rows


def measured_rows(measured: Measured) -> list[tuple[str, str]]:
    """Return (what, figure) for each measurement."""
    floor = spell_number(measured.bf16_floor_kl)
    rows = [("KL", f"{spell_interval(measured.kl)} nats per {measured.unit}; bf16 itself {floor}")]
    if measured.ppl is not None:
        ppl = measured.ppl
        ratio = f"ratio {ppl.ratio:.4f} [{ppl.low:.4f}, {ppl.high:.4f}]"
        rows.append(("perplexity", f"{ppl.base:.2f} → {ppl.plan:.2f}, {ratio}"))
    if measured.top1_agreement is not None:
        rows.append(("same top token", _spell_share(measured.top1_agreement)))
    if measured.embedding is not None:
        rows += _embedding_rows(measured.embedding)
    if measured.kl_p999 is not None:
        rows.append(("KL, 99.9 %", f"one token in a thousand exceeds {spell_number(measured.kl_p999)} nats"))
    if measured.repetition is not None:
        repetition = measured.repetition
        rows.append(("repetition", f"{spell_percent(repetition.plan)} (reference {spell_percent(repetition.base)})"))
    if measured.overflows is not None:
        fell_back = f"{spell_percent(measured.fallback_rate or 0.0)} of tokens have one at a matrix"
        rows.append(("overflows", f"{spell_number(measured.overflows)} per million rounded values; {fell_back}"))
    source = f" of {measured.source}" if measured.source else ""
    rows.append(
        (
            "measured on",
            f"{spell_count(measured.tokens, 'token')}{source} in {spell_count(measured.sequences, 'sequence')}; "
            f"brackets are {100 * measured.confidence:.0f} % intervals",
        )
    )
    return rows


def _embedding_rows(found: EmbeddingFigures) -> list[tuple[str, str]]:
    mean, low = (f"{x.mean:.5f} [{x.low:.5f}, {x.high:.5f}]" for x in (found.cosine, found.cosine_low))
    rows = [("cosine", f"{mean}; one text in twenty falls below {low}")]
    rows += [
        (f"nearest {n.k}" if n.k > 1 else "nearest", f"{_spell_share(n.overlap)} stay, among {found.corpus:,} texts")
        for n in found.neighbours
    ]
    if found.rank_correlation is not None:
        tau = found.rank_correlation
        rows.append(("their order", f"Kendall's τ {tau.mean:.3f} [{tau.low:.3f}, {tau.high:.3f}] of the ten nearest"))
    return rows


def least_rows(asked: int | None, sequences: int, plan: Plan) -> list[tuple[str, str]]:
    """Say that more text was taken than was asked for, where that is so."""
    length = 0 if plan.options is None else plan.options.sequence_length
    if asked is None or asked > (sequences - 1) * length:
        return []
    least = spell_count(sequences, "sequence")
    return [("tokens", f"{asked:,} were asked for; {least} of {length} were taken, the fewest that intervals are from")]


def _spell_share(share: Interval) -> str:
    return f"{spell_percent(share.mean)} [{spell_percent(share.low)}, {spell_percent(share.high)}]"


def print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    """Print (title, text) pairs in two columns."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    room = console.width - max((cell_len(title) for title, _ in rows), default=0) - 2
    for title, text in rows:
        grid.add_row(Text(title), Text(_wrapped(text, room)))
    print_table(console, grid)


def _wrapped(text: str, room: int) -> str:
    """Break into lines at spaces, none of which parts a number from its unit; the terminal breaks at any."""
    held = BEFORE_UNIT.sub(_HELD, text)
    lines = [""]
    for word in held.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if lines[-1] and cell_len(longer) > max(room, _FOLDED_WIDTH):
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines).replace(_HELD, " ")


def print_limits(console: Console, plan: Plan) -> None:
    """Print each limit with its value and status, then the verdict."""
    for limit in plan.limits:
        style = "red" if limit.status == "missed" else "green"
        title = LIMIT_TITLES.get(limit.name, limit.name)
        value = spell_limit_value(limit.name, limit.value)
        _say(console, f"{limit.status}: {title} {value}, limit {say_bound(limit)} ({spell_excess(limit)})", style=style)
    if not plan.budget.limits:
        _say(console, "the plan has no limits", style="dim")
    elif plan.met:
        _say(console, "every limit is met", style="bold green")
    else:
        _say(console, "not every limit is met; this is the best plan that was found", style="bold red")


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))
