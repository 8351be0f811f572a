"""``bitwright train policies [NAME]``: the training policies, or one of them operation by operation."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.table import new_console, new_table, print_rows, print_table

#: Who sees to a format, in words.
_BY = (
    "by: autocast is torch's; a kernel adds in fp32 whatever it is given; torch promotes to the wider dtype; bitwright "
    "casts what is left, and rounds operands that the device does not"
)


def policies_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A policy, by its name or an alias; or auto.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", metavar="NAME|FILE", help="Say what runs natively on a device.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Who sees to a format on a CPU, whose autocast differs from a GPU's.")
    ] = False,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="Whose moments are counted as memory.")] = "adamw",
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON and nothing else.")] = False,
) -> None:
    """List training policies, or say of one which operation runs in which format, and why."""
    if json:
        facts = _all_facts(hardware, optimizer) if name is None else _facts_of(name, hardware, optimizer, cpu)
        write_json(json_format.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    elif name is None:
        _print_all(hardware, optimizer)
    else:
        _print_one(name, hardware, optimizer, cpu)


def _print_all(hardware: str | None, optimizer: str) -> None:
    last = f"on {hardware}" if hardware else "what it is"
    table = new_table(("policy", False), ("products", False), ("bytes", True), (last, False))
    for facts in _all_facts(hardware, optimizer)["policies"]:
        says = (facts["why_not"] or "natively") if hardware else facts["description"]
        table.add_row(
            Text(facts["name"]),
            Text(facts["level"]),
            f"{facts['bytes_per_parameter']:g}",
            Text(says),
        )
    console = new_console()
    print_table(console, table)
    console.print(
        Text(
            f"bytes: of a parameter with its gradient and {optimizer}'s moments; copies in the products' format come "
            "on top while a step runs",
            style="dim",
        )
    )
    if hardware:
        chosen = _chosen(hardware)
        console.print(Text(f"auto: {chosen.policy.name}, since {chosen.reason}"))


def _print_one(name: str, hardware: str | None, optimizer: str, cpu: bool) -> None:
    facts = _facts_of(name, hardware, optimizer, cpu)
    console = new_console()
    rows = [
        ("policy", f"{facts['name']}: {facts['description']}"),
        ("chosen", facts.get("reason", "")),
        ("also called", ", ".join(facts["aliases"])),
        ("source", facts["source"]),
        ("memory", _say_memory(facts["bytes"], facts["bytes_per_parameter"], optimizer)),
    ]
    if hardware is not None:
        rows.append((f"on {hardware}", facts["why_not"] or "natively"))
    print_rows(console, [row for row in rows if row[1]])
    sections: dict[str, list[dict[str, str]]] = {}
    for row in facts["operations"]:
        sections.setdefault(row["section"], []).append(row)
    _print_section(console, "linear layers", sections.get("products", []))
    console.print()
    table = new_table(("operation", False), ("format", False), ("by", False), ("why", False))
    for row in sections["operations"]:
        table.add_row(Text(row["what"]), Text(row["format"]), Text(row["by"]), Text(row["why"]))
    print_table(console, table)
    _print_section(console, "kept between steps", sections["states"])
    console.print()
    console.print(Text(_BY, style="dim"))


def _print_section(console: Console, title: str, rows: list[dict[str, str]]) -> None:
    if rows:
        console.print()
        console.print(Text(title, style="bold"))
        print_rows(console, [(row["what"], f"{row['format']}: {row['why']}") for row in rows])


def _say_memory(parts: dict[str, float], total: float, optimizer: str) -> str:
    told = [f"{name.replace('_', ' ')} {size:g}" for name, size in parts.items() if size and "copies" not in name]
    copies = parts.get("copies", 0.0)
    extra = f"; {copies:.3g} more for what products read, while a step runs" if copies else ""
    return f"{total:g} bytes a parameter with {optimizer} ({', '.join(told)}){extra}"


def _facts_of(name: str, hardware: str | None, optimizer: str, cpu: bool) -> dict[str, Any]:
    from bitwright.training.forward.operation_table import operation_table
    from bitwright.training.policy import AUTO, policy_named

    facts: dict[str, Any] = {}
    if name == AUTO:
        chosen = _chosen(hardware)
        policy, facts["reason"] = chosen.policy, chosen.reason
    else:
        policy = policy_named(name)
    table = operation_table(policy, "cpu" if cpu else "cuda")
    return {**_summary(policy, hardware, optimizer), **facts, "operations": [asdict(row) for row in table]}


def _all_facts(hardware: str | None, optimizer: str) -> dict[str, Any]:
    from bitwright import formats
    from bitwright.training.policy import POLICIES

    def width(policy: Any) -> int:
        return max(formats.FORMATS[name].bits for name in policy.level.split("/"))

    # sorting is stable: policies of one width stay as their folder has them
    ordered = sorted(POLICIES.values(), key=lambda policy: -width(policy))
    facts: dict[str, Any] = {"policies": [_summary(policy, hardware, optimizer) for policy in ordered]}
    if hardware is not None:
        chosen = _chosen(hardware)
        facts["auto"] = {"policy": chosen.policy.name, "reason": chosen.reason}
    return facts


def _summary(policy: Any, hardware: str | None, optimizer: str) -> dict[str, Any]:
    from bitwright.training.choose import why_not
    from bitwright.training.policy_bits import state_bits

    bits = state_bits(policy, optimizer=optimizer)
    facts = {
        "name": policy.name,
        "description": policy.description,
        "aliases": list(policy.aliases),
        "source": policy.source,
        "compute": policy.compute,
        "level": policy.level,
        "parameters": policy.parameters,
        "update": policy.update,
        "moments": policy.moments,
        "bytes_per_parameter": bits.bytes_per_parameter,
        "bytes": {name: bits_of / 8 for name, bits_of in asdict(bits).items()},
    }
    return facts if hardware is None else {**facts, "why_not": why_not(policy, _device(hardware))}


def _chosen(hardware: str | None) -> Any:
    """What "auto" is on a device; on the one that is here unless it is named."""
    from bitwright.hardware import detect
    from bitwright.training.choose import choose_policy

    return choose_policy(detect()[0] if hardware is None else _device(hardware))


def _device(text: str) -> Any:
    from bitwright.cli.hardware_show import find_device

    return find_device(text)
