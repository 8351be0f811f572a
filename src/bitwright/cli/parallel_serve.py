"""``bitwright parallel serve MODEL --cluster h100x8``: what serving takes, by GPUs of a replica and sequences at once.

Exit code 3: nothing of what was asked for fits.
"""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.hardware_show import find_device
from bitwright.cli.output import write_json
from bitwright.cli.parallel import ClusterFileOption, ClusterOption, HardwareOption, ModelArgument, read_topology
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake, split_names
from bitwright.report.units import spell_bytes, spell_seconds

if TYPE_CHECKING:
    from bitwright.parallel.serving_plan import ServingChoice, ServingPlan, ServingRequest
    from bitwright.parallel.serving_time import ServingTime

#: Parts of a step, for people.
_PARTS = {"weights": "products", "attention": "attention", "collectives": "collectives", "launches": "launches"}


def serve_command(
    model: ModelArgument,
    cluster: ClusterOption = None,
    cluster_file: ClusterFileOption = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence: its prompt, and its cache.")] = 4096,
    batch: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Sequences at once; the most that fit comes too.")
    ] = "1,8,32",
    tp: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="GPUs that hold a model; default: 1, 2, 4 … to a node.")
    ] = None,
    scheme: Annotated[str, typer.Option(metavar="NAME", help="Of the linear layers: bf16, fp8, int4_g128, …")] = "bf16",
    kv: Annotated[
        str, typer.Option(metavar="NAME", help="Of the cache: bf16_values, fp8_e4m3_tensor, …")
    ] = "bf16_values",
    hardware_name: HardwareOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Say what serving takes, by GPUs that hold the model and sequences at once: memory, prefill, time of a token.

    Exit code 3: nothing of what was asked for fits into memory.
    """
    from bitwright.models.shape import shape_of
    from bitwright.parallel.serving_plan import ServingRequest, plan_serving

    shape = shape_of(model)
    weight_bits, compute = _weights(scheme)
    request = ServingRequest(
        shape=shape,
        topology=read_topology(cluster, cluster_file),
        context=context,
        batches=_numbers("--batch", batch),
        tps=() if tp is None else _numbers("--tp", tp),
        device=None if hardware_name is None else find_device(hardware_name),
        weight_bits=weight_bits,
        kv_bits=_kv_bits(kv, shape.head_dim),
        compute=compute,
    )
    plan = plan_serving(request)
    if json:
        write_json(json_format.dumps(_facts(request, plan), indent=2, ensure_ascii=False) + "\n")
    else:
        _print(new_console(highlight=False), request, plan, scheme, kv)
    if not plan.choices:
        raise typer.Exit(3)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = split_names(text, "number")
    wrong = [word for word in words if not word.isdecimal() or int(word) < 1]
    if wrong:
        raise UsageMistake(f"{option} has {wrong[0]!r}; it takes whole numbers from 1, with commas between them")
    return tuple(dict.fromkeys(map(int, words)))


def _weights(scheme: str) -> tuple[float, str]:
    """Stored bits of a weight, and the format that products run in."""
    from bitwright.quantize.catalogs import SCHEMES
    from bitwright.training.policy_bits import base_bits

    found = SCHEMES[scheme]
    compute = "bf16" if found.activations is None else found.activations.format
    return base_bits(scheme)[0], compute


def _kv_bits(name: str, head_dim: int) -> float:
    from bitwright.quantize.catalogs import VALUE_SCHEMES

    found = VALUE_SCHEMES[name]
    if "kv_cache" not in found.roles:
        able = [known for known, other in VALUE_SCHEMES.items() if "kv_cache" in other.roles]
        raise UsageMistake(
            f"--kv is '{name}', which is for {', '.join(sorted(found.roles))}; use one of {', '.join(able)}"
        )
    return found.stored_bits(head_dim)


def _print(console: Console, request: ServingRequest, plan: ServingPlan, scheme: str, kv: str) -> None:
    from bitwright.parallel.job import position_note

    shape, device = request.shape, plan.device
    rows = [
        ("model", f"{shape.name}, {shape.num_parameters:,} parameters"),
        ("cluster", f"{request.topology.spelled}: {request.topology.num_ranks} × {device.name}"),
        ("weights", f"{scheme}: {request.weight_bits:.4g} bits a weight, products in {request.compute}"),
        ("cache", f"{kv}: {request.kv_bits:.4g} bits a number, {request.context:,} tokens of each sequence"),
        *((("note", note),) if (note := position_note(shape, request.context)) else ()),
    ]
    print_rows(console, rows)
    console.print()
    if plan.choices:
        _print_choices(console, plan)
    if plan.too_large:
        style = "dim" if plan.choices else "bold red"
        console.print(Text(_spell_misses(plan), style=style))
    console.print(Text("All predicted; weights of a replica on tp GPUs of one node.", style="dim"))


def _print_choices(console: Console, plan: ServingPlan) -> None:
    table = new_table(
        ("tp", True),
        ("sequences", True),
        ("memory", True),
        ("prefill", True),
        ("a token", True),
        ("tokens/s of\na sequence", True),
        ("tokens/s\nper GPU", True),
        ("most of\na token", False),
    )
    for choice in plan.choices:
        table.add_row(
            str(choice.tp),
            f"{choice.batch:,}",
            spell_bytes(choice.memory_bytes),
            spell_seconds(choice.prefill.seconds),
            spell_seconds(choice.decode.seconds),
            f"{1 / choice.decode.seconds:,.1f}",
            f"{choice.tokens_per_s_per_gpu:,.0f}",
            Text(_spell_most(choice.decode)),
        )
    print_table(console, table)
    console.print()
    print_rows(
        console,
        [
            ("fastest token", _spell(plan.fastest)),
            ("most tokens of a GPU", _spell(plan.busiest)),
            ("kernels", plan.efficiency_reason.split(";")[0]),
        ],
    )


def _spell(choice: ServingChoice) -> str:
    replicas = "1 replica says" if choice.replicas == 1 else f"{choice.replicas} replicas say"
    total = choice.replicas * choice.batch / choice.decode.seconds
    return (
        f"tp {choice.tp}, {choice.batch:,} at once: {spell_seconds(choice.decode.seconds)}; {replicas} "
        f"{total:,.0f} tokens/s"
    )


def _spell_misses(plan: ServingPlan) -> str:
    """The least that does not fit, by GPUs of a replica; where nothing fits, the nearest miss."""
    if not plan.choices:
        tp, batch, over = min(plan.too_large, key=lambda miss: miss[2])
        return f"out of memory: nothing fits; the nearest, tp {tp} with {batch:,} at once, is {spell_bytes(over)} over"
    least = {tp: (batch, over) for tp, batch, over in reversed(plan.too_large)}
    told = [f"tp {tp} from {batch:,} at once, {spell_bytes(over)} over" for tp, (batch, over) in sorted(least.items())]
    return f"out of memory: {'; '.join(told)}"


def _spell_most(time: ServingTime) -> str:
    name = max(time.parts, key=lambda part: time.parts[part])
    return f"{_PARTS[name]} {time.parts[name] / time.seconds:.0%}"


def _facts(request: ServingRequest, plan: ServingPlan) -> dict[str, object]:
    from bitwright.parallel.job import position_note

    return {
        "model": request.shape.name,
        "parameters": request.shape.num_parameters,
        "cluster": request.topology.spelled,
        "device": plan.device.name,
        "context": request.context,
        "note": position_note(request.shape, request.context),
        "weight_bits": request.weight_bits,
        "kv_bits": request.kv_bits,
        "compute": request.compute,
        "status": "predicted",
        "choices": [
            {
                "tp": choice.tp,
                "batch": choice.batch,
                "replicas": choice.replicas,
                "memory_bytes": choice.memory_bytes,
                "prefill_s": choice.prefill.seconds,
                "prefill_parts_s": dict(choice.prefill.parts),
                "decode_s": choice.decode.seconds,
                "decode_parts_s": dict(choice.decode.parts),
                "tokens_per_s_per_gpu": choice.tokens_per_s_per_gpu,
            }
            for choice in plan.choices
        ],
        "too_large": [{"tp": tp, "batch": batch, "over_bytes": over} for tp, batch, over in plan.too_large],
        "largest_batch": [{"tp": tp, "batch": most} for tp, most in plan.largest],
    }
