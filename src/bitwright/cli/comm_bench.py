"""``bitwright comm bench``: collectives between the processes that torchrun started, timed and checked.

Rank 0 prints; a rank that fails is named by the others. Processes end with code 2 whatever state the backend is in, and
with 130 when they are interrupted.
"""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitwright.cli.output import write_json
from bitwright.cli.usage import UsageMistake, is_given, raise_if_there, split_names
from bitwright.comms.explain import collective_name
from bitwright.comms.sizes import parse_sizes, spell_count
from bitwright.errors import CommsError

if TYPE_CHECKING:
    from bitwright.comms.bench import Measurement

#: nccl-tests' columns, and ours of the algorithm.
_COLUMNS = "{:>12} {:>12} {:>9} {:>15} {:>18} {:>12} {:>8} {:>8} {:>7}"
_HEAD = _COLUMNS.format("size", "count", "type", "operation", "algorithm", "time", "algbw", "busbw", "#wrong")
_UNITS = _COLUMNS.format("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")


def bench_command(
    context: typer.Context,
    op: Annotated[str, typer.Option("--op", metavar="NAMES", help="Collectives, with commas between.")] = "all_reduce",
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="8B..256MiB, or 1KiB,1MiB.")] = "8B..4MiB",
    factor: Annotated[int, typer.Option(min=2, help="From one size of a range to the next.")] = 4,
    dtype: Annotated[str, typer.Option(metavar="NAMES", help="fp32, bf16, fp16, fp8_e4m3, int8.")] = "fp32",
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="library (the backend's own), ring, tree, two_shot … Default: library; else a ring."
        ),
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1, help="For hierarchical, which needs it.")] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="gloo, or nccl where ranks have GPUs.")] = "gloo",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="After which a rank that waits gives up.")] = 60.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A .json file for bitwright comm fit.")] = None,
    nan_rank: Annotated[int | None, typer.Option(hidden=True)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON and nothing else.")] = False,
) -> None:
    """Measure collectives between the processes of torchrun: time, bandwidths, and wrong numbers.

    torchrun --nproc-per-node 4 --no-python bitwright comm bench --op all_reduce,all_gather --algorithm library,ring
    """
    if timeout <= 0:
        raise UsageMistake(f"--timeout is {timeout:g}; give seconds above 0")
    if out is not None and (out.suffix != ".json" or not out.absolute().parent.is_dir()):
        raise UsageMistake(f"--out is '{out}'; name a .json file in a folder that exists")
    if out is not None:
        raise_if_there(out)
    if is_given(context, "factor") and ".." not in sizes:
        raise UsageMistake(
            f"--factor {factor} changes nothing, since --sizes {sizes} is no range; leave one of them out"
        )
    ops = tuple(collective_name(name) for name in split_names(op, "collective"))
    # When a peer is gone, the backend logs its own stack; it reads this where torch is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.comms.bench import BenchSettings, as_json, run_bench
    from bitwright.comms.peers import Peers
    from bitwright.comms.wire import wire_format

    settings = BenchSettings(
        ops=ops,
        sizes=parse_sizes(sizes, factor),
        dtypes=tuple(wire_format(name).name for name in split_names(dtype, "type")),
        algorithms=() if algorithm is None else tuple(split_names(algorithm, "algorithm")),
        ranks_per_node=ranks_per_node,
        nan_rank=nan_rank,
    )
    peers = None
    try:
        peers = Peers(backend=backend, timeout_s=timeout)
        is_teller = peers.rank == 0
        if is_teller and not json:
            sys.stdout.write(f"# {spell_count(peers.size, 'rank')} over {backend}\n{_HEAD}\n{_UNITS}\n")
        found = run_bench(settings, peers, _teller(is_teller and not json))
        peers.close()
    except CommsError as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: rank {os.environ.get('RANK', '0')}: {error}\n")
        sys.stderr.flush()
        if peers is not None:
            peers.abandon()
        # Not `exit`: the backend's threads may wait for ever for a peer that is gone.
        os._exit(2)
    except KeyboardInterrupt:
        sys.stdout.flush()
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("interrupted\n")
            sys.stderr.flush()
        if peers is not None:
            peers.stop_beating()
        os._exit(130)
    finally:
        if peers is not None:
            peers.stop_beating()
    if not is_teller:
        return
    told = as_json(found, backend, ranks_per_node)
    if not json:
        sys.stdout.writelines(f"# left out: {item.what}: {item.reason}\n" for item in found.left_out)
    if out is not None:
        out.write_text(json_format.dumps(told, indent=1) + "\n", encoding="utf-8")
    if json:
        write_json(json_format.dumps(told, indent=1) + "\n")
    wrong = sum(row.num_wrong for row in found.rows)
    if wrong and not json:
        sys.stdout.write(f"# {spell_count(wrong, 'wrong number')}\n")
    if wrong:
        raise typer.Exit(1)


def _teller(is_on: bool) -> Callable[[Measurement], None]:
    def tell(row: Measurement) -> None:
        if is_on:
            bandwidths = (f"{row.algbw_gb_per_s:.3f}", f"{row.busbw_gb_per_s:.3f}")
            figures = (f"{1e6 * row.time_s:.1f}", *bandwidths, row.num_wrong)
            words = _COLUMNS.format(row.num_bytes, row.count, row.dtype, row.op, row.algorithm, *figures)
            sys.stdout.write(f"{words}\n")
            sys.stdout.flush()

    return tell
