"""``bitwright memory MODEL --policy … --gpus … --zero …``: what a training step takes on each GPU, line by line.

Every line is predicted from shapes (`hardware/memory`), and says how it comes about. With ``--hardware`` it is held
against the device, and where it does not fit, the first change that makes it fit is named.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import typer
from rich.console import Console
from rich.text import Text

from bitwright import hardware
from bitwright.cli.hardware_show import find_device
from bitwright.cli.output import write_json
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake
from bitwright.hardware import Device
from bitwright.hardware.memory import StateBits, TrainingMemory
from bitwright.hardware.memory.training import INSTANTS, Instant, training_memory
from bitwright.hardware.memory.training_activations import Attention, Recompute
from bitwright.hardware.memory.training_states import Sharding
from bitwright.hardware.model_shape import ModelShape
from bitwright.report.units import spell_bytes, spell_count

_TITLES: dict[Instant, str] = {
    "loss": "when the backward pass begins",
    "backward": "when it is done",
    "update": "while the optimizer steps",
}


#: What linears that are frozen under adapters lie in unless somebody says.
_BASE = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """What was asked: a model under a policy, on some GPUs."""

    shape: ModelShape
    policy: Any
    sharding: Sharding
    batch: int
    sequence: int
    recompute: Recompute
    attention: Attention
    optimizer: str
    masters: Literal["in model", "in optimizer"]
    rank: int | None
    base: str
    accumulates: bool
    kind: hardware.device.Kind


def memory_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder (its config.json is enough), a hub id, demo, or a name such as llama-7b."
        ),
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME|PLAN",
            help="A training policy; auto: what --hardware runs; or the folder of a training plan.",
            rich_help_panel="Step",
        ),
    ] = "bf16-mixed",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of one GPU at once.", rich_help_panel="Step")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.", rich_help_panel="Step")] = 2048,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="none|full", help="Activations of layers again in the backward pass.", rich_help_panel="Step"
        ),
    ] = "none",
    attention: Annotated[
        str, typer.Option(metavar="fused|stored", help="Whether scores are written out.", rich_help_panel="Step")
    ] = "fused",
    accumulate: Annotated[
        int, typer.Option(min=1, help="Backward passes that an update sums.", rich_help_panel="Step")
    ] = 1,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="adamw, sgd, sgd-momentum, lion, …", rich_help_panel="Step")
    ] = "adamw",
    masters: Annotated[
        str,
        typer.Option(
            metavar="model|optimizer",
            help="Where fp32 masters lie: autocast has them in the model, DeepSpeed and Megatron in the optimizer.",
            rich_help_panel="Step",
        ),
    ] = "model",
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train adapters of this rank on every linear; the rest is frozen.",
            rich_help_panel="Step",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help=f"Of the frozen linears under adapters; default: {_BASE}.",
            rich_help_panel="Step",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs together.", rich_help_panel="GPUs")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage; 3 is FSDP.", rich_help_panel="GPUs")] = 0,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs that divide every matrix.", rich_help_panel="GPUs")
    ] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="They divide the tokens of norms too.", rich_help_panel="GPUs")
    ] = False,
    hardware_name: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME|FILE", help="Say whether it fits.", rich_help_panel="GPUs", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Say what a training step takes on each GPU, line by line.

    Exit code 3: it does not fit on the hardware.
    """
    if base is not None and lora_rank is None:
        raise UsageMistake(
            f"--base {base} is of linears that are frozen under adapters, and without --lora-rank all of the model is "
            "trained; add --lora-rank 16, or leave --base out"
        )
    device = None if hardware_name is None else find_device(hardware_name)
    sharding = Sharding(
        num_gpus=gpus, zero=zero, tensor_parallel=tensor_parallel, is_sequence_parallel=sequence_parallel
    )
    chosen, policy_reason = _policy(policy, device)
    from bitwright.models.shape import shape_of

    question = _Question(
        shape=shape_of(model),
        policy=chosen,
        sharding=sharding,
        batch=batch,
        sequence=seq,
        recompute=cast(Recompute, _one_of("--recompute", recompute, get_args(Recompute))),
        attention=cast(Attention, _one_of("--attention", attention, get_args(Attention))),
        optimizer=optimizer,
        masters="in optimizer" if _one_of("--masters", masters, ("model", "optimizer")) == "optimizer" else "in model",
        rank=lora_rank,
        base=base or _BASE,
        accumulates=accumulate > 1,
        kind="gpu" if device is None else device.kind,
    )
    found = _answer(question)
    fits = None if device is None else found.peak <= device.memory_bytes
    if json:
        write_json(json_format.dumps(_facts(question, found, device, policy_reason), indent=2) + "\n")
    else:
        _print(new_console(highlight=False), question, found, device, policy_reason)
    if fits is False:
        raise typer.Exit(3)


def _policy(name: str, device: Device | None) -> tuple[Any, str]:
    """The policy, and why where nobody named it."""
    from bitwright.training.asked_policy import is_path
    from bitwright.training.policy import AUTO, policy_named

    if is_path(name) or Path(name).is_dir():
        return _policy_of_plan(name)
    if name != AUTO:
        return policy_named(name), ""
    if device is None:
        raise UsageMistake("--policy auto follows from the device; name one with --hardware, or name a policy")
    from bitwright.training.choose import choose_policy

    found = choose_policy(device)
    return found.policy, found.reason


def _policy_of_plan(folder: str) -> tuple[Any, str]:
    """The policy of a training plan. Figures know one recipe for all products, a plan one for each."""
    from bitwright.training.asked_policy import plan_at
    from bitwright.training.planning.planned_policy import policy_of_plan

    plan = plan_at(folder)
    found = policy_of_plan(plan)
    reason = f"by the plan '{folder}' for {plan.model.name}"
    if found.high:
        reason += f"; {spell_count(len(found.high), 'product')} of it in {found.policy.compute} counted like the others"
    return found.policy, reason


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageMistake(f"{option} is {value!r}; it takes {' or '.join(known)}")
    return value


def _answer(question: _Question) -> TrainingMemory:
    from bitwright.training.policy_bits import activation_setup, adapters_on, update_scratch

    adapters = None
    states = _states(question)
    if question.rank is not None:
        adapters = adapters_on(question.base, question.rank, question.policy)
    activations = activation_setup(
        question.policy,
        batch=question.batch,
        sequence=question.sequence,
        masters=question.masters,
        attention=question.attention,
        recompute=question.recompute,
        **({"stream_bits": adapters.other_bits, "input_bits": None, "casts_each_input": True} if adapters else {}),
    )
    scratch, elements = update_scratch(question.policy, optimizer=question.optimizer)
    return training_memory(
        question.shape,
        states,
        activations,
        sharding=question.sharding,
        adapters=adapters,
        accumulates=question.accumulates,
        update_bits=scratch,
        update_elements=elements,
        kind=question.kind,
    )


def _states(question: _Question) -> StateBits:
    from bitwright.training.policy_bits import adapter_bits, state_bits

    if question.rank is not None:
        return adapter_bits(question.policy, optimizer=question.optimizer)
    return state_bits(question.policy, optimizer=question.optimizer, masters=question.masters)


def _print(
    console: Console, question: _Question, found: TrainingMemory, device: Device | None, policy_reason: str
) -> None:
    shape, sharding = question.shape, question.sharding
    rows = [
        ("model", f"{shape.name}, {shape.num_parameters:,} parameters"),
        ("policy", f"{question.policy.name}: {question.policy.description}"),
        *((("chosen", policy_reason),) if policy_reason else ()),
        ("states", f"{_states(question).bytes_per_parameter:g} bytes a trained parameter with {question.optimizer}"),
        ("step", f"{question.batch} × {spell_count(question.sequence, 'token')} on each GPU"),
        ("GPUs", _spell_sharding(sharding)),
    ]
    if question.rank is not None:
        rows.append(("adapters", f"rank {question.rank} on every linear; the base is frozen in {question.base}"))
    print_rows(console, rows)
    console.print()
    table = new_table(("on each GPU", False), ("size", True), ("how", False))
    for line in found.lines:
        table.add_row(Text(line.name), spell_bytes(line.num_bytes), Text(line.formula))
    table.add_section()
    for instant in INSTANTS:
        is_peak = instant == found.peak_instant
        style = "bold" if is_peak else ""
        table.add_row(
            Text(_TITLES[instant], style=style), Text(spell_bytes(found.at(instant)), style=style), "peak" * is_peak
        )
    print_table(console, table)
    console.print(
        Text(
            "All predicted. On top: buffers of collectives, the allocator's reserve, and 4 B a parameter while an "
            "optimizer that is not fused steps.",
            style="dim",
        )
    )
    if device is not None:
        _print_fit(console, question, found, device)


def _spell_sharding(sharding: Sharding) -> str:
    text = f"{sharding.num_gpus}, ZeRO {sharding.zero}"
    if sharding.zero and sharding.data_parallel == 1:
        text += ", which divides nothing: no other GPU holds the same (give more --gpus)"
    if sharding.tensor_parallel > 1:
        text += f", every matrix over {sharding.tensor_parallel}"
        text += " (tokens of norms too)" * sharding.is_sequence_parallel
    return text


def _print_fit(console: Console, question: _Question, found: TrainingMemory, device: Device) -> None:
    has = device.memory_bytes
    if found.peak <= has:
        spare = spell_bytes(has - found.peak)
        console.print(Text(f"fits on {device.name}: {spell_bytes(has)}, {spare} to spare", style="bold green"))
        return
    console.print(
        Text(
            f"does not fit on {device.name}: {spell_bytes(has)}, {spell_bytes(found.peak - has)} short",
            style="red",
        )
    )
    for change, other in _changes(question):
        if _answer(other).peak <= has:
            console.print(Text(f"would fit with {change}"))
            return
    console.print(Text("no single change of those that this command knows makes it fit"))


def _changes(question: _Question) -> Iterator[tuple[str, _Question]]:
    """Ways to need less, the cheapest first."""
    recomputed = replace(question, recompute="full")
    if question.recompute == "none":
        yield "--recompute full", recomputed
    if question.sharding.data_parallel > 1 and question.sharding.zero < 3:
        for stage in range(question.sharding.zero + 1, 4):
            shared = replace(question.sharding, zero=stage)
            yield f"--zero {stage}", replace(question, sharding=shared)
            yield f"--zero {stage} --recompute full", replace(recomputed, sharding=shared)
    gpus = question.sharding.num_gpus
    while gpus < 16 * question.sharding.num_gpus or gpus < 1024:
        gpus *= 2
        shared = replace(question.sharding, num_gpus=gpus, zero=3)
        yield f"--gpus {gpus} --zero 3", replace(question, sharding=shared)
        yield f"--gpus {gpus} --zero 3 --recompute full", replace(recomputed, sharding=shared)


def _facts(question: _Question, found: TrainingMemory, device: Device | None, policy_reason: str) -> dict[str, object]:
    facts: dict[str, object] = {
        "model": question.shape.name,
        "parameters": question.shape.num_parameters,
        "policy": question.policy.name,
        "policy_reason": policy_reason,
        "lines": [
            {"name": line.name, "bytes": line.num_bytes, "how": line.formula, "alive": list(line.alive)}
            for line in found.lines
        ],
        **{f"{instant}_bytes": found.at(instant) for instant in INSTANTS},
        "peak_bytes": found.peak,
    }
    if device is not None:
        facts |= {"hardware": device.name, "device_bytes": device.memory_bytes}
        facts["fits"] = found.peak <= device.memory_bytes
    return facts
