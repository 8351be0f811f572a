"""``bitwright parallel``: how to divide training and serving over a cluster. Its verbs are files beside this one.

What verbs ask for together is here: a model, a cluster, a batch, policies, and axes that are not to be searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.hardware_show import find_device
from bitwright.cli.usage import UsageMistake
from bitwright.comms.topology import Topology
from bitwright.comms.topology_file import topology
from bitwright.hardware import Device

if TYPE_CHECKING:
    from bitwright.parallel.planner import PlanRequest


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder (its config.json is enough), a hub id, demo, or a name such as llama-3-70b."
    ),
]
ClusterFileOption = Annotated[
    str | None,
    typer.Option(
        "--cluster-file", metavar="FILE", help="A topology file of your own, as `comm fit` writes.", show_default=False
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(metavar="NAMExGPUSxNODES", help="h100x8x16: 16 nodes of 8 H100.", show_default=False),
]
GlobalBatchOption = Annotated[
    int | None, typer.Option(min=1, help="Sequences of a step; default: 4 a GPU.", show_default=False)
]
SequenceOption = Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")]
OptimizerOption = Annotated[str, typer.Option(metavar="NAME", help="adamw, sgd, lion, …")]
HardwareOption = Annotated[
    str | None,
    typer.Option("--hardware", metavar="NAME|FILE", help="In place of the cluster's device.", show_default=False),
]


def parallel_command(context: typer.Context) -> None:
    """Divide a model over a cluster: layouts of a training step, what overlaps what, and what serving takes."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def read_request(
    *,
    model: str,
    cluster: str | None,
    cluster_file: str | None,
    policies: Sequence[str],
    global_batch: int | None,
    sequence: int,
    optimizer: str,
    hardware_name: str | None,
    fixed: Sequence[str],
) -> PlanRequest:
    """Return what is to be planned; every question is answered before anything is computed.

    Raises:
        UsageMistake: neither or both of the ways to name a cluster, or an unknown axis.
        ParallelError: an axis is given twice or cannot have its size, or what `PlanRequest` refuses.
    """
    from bitwright.models.shape import shape_of
    from bitwright.parallel.planner import PlanRequest
    from bitwright.parallel.search_space import raise_if_no_axes
    from bitwright.training.policy import policy_named

    axes = tuple(_axis(text) for text in fixed)
    raise_if_no_axes(axes)
    found = read_topology(cluster, cluster_file)
    device = None if hardware_name is None else find_device(hardware_name)
    names = dict.fromkeys(_chosen(name, found, device)[0] for name in policies)
    return PlanRequest(
        shape=shape_of(model),
        sequence=sequence,
        global_batch=4 * found.num_ranks if global_batch is None else global_batch,
        topology=found,
        policies=tuple({policy.name: policy for policy in map(policy_named, names)}.values()),
        optimizer=optimizer,
        device=device,
        fixed=axes,
    )


def policy_reason(policies: Sequence[str], request: PlanRequest) -> str:
    """Return why a policy was chosen for a device; "" where all were named."""
    reasons = [_chosen(name, request.topology, request.device)[1] for name in policies]
    return "; ".join(reason for reason in reasons if reason)


def _chosen(name: str, on: Topology, device: Device | None) -> tuple[str, str]:
    """The name of a policy, and where it is "auto" of the one that the device runs best, with the reason."""
    from bitwright.parallel.job import device_of, raise_if_no_device
    from bitwright.training.choose import choose_policy
    from bitwright.training.policy import AUTO

    if name.strip().lower() != AUTO:
        return name, ""
    raise_if_no_device(on, device)
    found = choose_policy(device_of(on, device))
    return found.policy.name, f"{found.policy.name}: {found.reason}"


def read_topology(cluster: str | None, cluster_file: str | None) -> Topology:
    """Return the cluster that one of two options names.

    Raises:
        UsageMistake: neither of them does, or both do.
        CommsError, UnknownName: there is none of that name, or the file cannot be read.
    """
    if (cluster is None) == (cluster_file is None):
        raise UsageMistake("name the cluster once: --cluster h100x8x16, or --cluster-file FILE.toml (FILE.tomlx8x16)")
    return topology(str(cluster_file or cluster))


def _axis(text: str) -> tuple[str, int | str]:
    from bitwright.parallel.search_space import LEAST_SIZES, WORDS

    name, _, value = text.partition("=")
    name = name.replace("-", "_")
    if name in WORDS and value in WORDS[name]:
        return name, value
    if name in LEAST_SIZES and value.isdecimal():
        return name, int(value)
    axes, words = ", ".join(LEAST_SIZES), "; ".join(f"{axis}: {', '.join(those)}" for axis, those in WORDS.items())
    raise UsageMistake(f"--fix is {text!r}; it takes an axis and its size, as tp=8; axes: {axes}; {words}")
