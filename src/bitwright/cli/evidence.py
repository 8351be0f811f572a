"""The front, and how robust a plan is, as tables: what `--pareto` and `--robustness` added."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from bitwright.cli.table import new_table, print_table
from bitwright.plan import Plan
from bitwright.report.comparison_words import spell_signed
from bitwright.report.units import spell_bytes, spell_number, spell_percent, spell_seconds, spell_share


def print_evidence(console: Console, plan: Plan) -> None:
    """Print the tables that a plan has."""
    if plan.pareto:
        _print_front(console, plan)
    if plan.robustness is not None:
        _print_robustness(console, plan)


def _print_front(console: Console, plan: Plan) -> None:
    table = new_table(
        ("front", False),
        ("bits", True),
        ("memory", True),
        ("KL\nmeasured", True),
        ("a token", True),
        ("prefill", True),
        ("overflows\nper million", True),
        ("fall\nback", True),
    )
    for number, point in enumerate(plan.pareto, start=1):
        table.add_row(
            Text(f"{number} this plan" if point.chosen else str(number), style="bold" if point.chosen else ""),
            f"{point.effective_bits:.2f}",
            spell_bytes(point.memory_bytes),
            spell_number(point.kl.mean),
            spell_seconds(point.decode_s_per_token),
            spell_seconds(point.prefill_s),
            spell_number(point.overflows),
            spell_share(point.fallback_rate),
        )
    console.print()
    print_table(console, table)
    note = "Nothing here is beaten in everything. KL and overflows measured on the repair text, times "
    console.print(Text(note + plan.pareto[0].latency_status, style="dim"))


def _print_robustness(console: Console, plan: Plan) -> None:
    found = plan.robustness
    assert found is not None
    if found.others:
        table = new_table(
            ("searched again", False),
            ("same\nchoice", True),
            ("same\nscheme", True),
            ("size", True),
            ("KL\npredicted", True),
            ("KL\nmeasured", True),
            ("less this plan's", True),
        )
        for other in found.others:
            table.add_row(
                Text(other.what),
                spell_percent(other.same_choice),
                spell_percent(other.same_scheme),
                spell_bytes(other.weight_bytes),
                spell_number(other.predicted_kl),
                spell_number(other.kl.mean),
                spell_signed(other.difference),
            )
        console.print()
        print_table(console, table)
    if found.contexts:
        assert plan.options is not None
        table = new_table(("this plan at", False), ("KL measured", True), ("tokens", True))
        for context in found.contexts:
            table.add_row(
                f"{context.sequence_length} tokens",
                f"{spell_number(context.kl.mean)} [{spell_number(context.kl.low)}, {spell_number(context.kl.high)}]",
                f"{context.tokens:,}",
            )
        console.print()
        print_table(console, table)
        length = plan.options.sequence_length
        console.print(Text(f"It was chosen on texts of {length} tokens.", style="dim"))
    for note in found.notes:
        console.print(Text(note, style="dim"))
