"""The file that `comm bench --out` writes, read again and fitted: one file for each level, innermost first.

A topology has one rate for all types of numbers, and types differ in what adding and copying them costs, so that one
type is fitted; a file of several wants it named. A library's own collective is taken for the algorithm that it is known
to use where there is one choice of bytes: rings for all-reduce, all-gather and reduce-scatter, pairwise for all-to-all.
What goes along nodes (hierarchical) crosses two levels, which one time does not tell apart: it is left out, and its
cost follows from the levels' own messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright.comms.collectives import ALGORITHMS
from bitwright.comms.fit import Fit, Timed, fit_curves
from bitwright.comms.sizes import spell_count
from bitwright.comms.topology import Level, Topology
from bitwright.comms.topology_file import raise_if_no_name
from bitwright.comms.wire import wire_format
from bitwright.errors import CommsError
from bitwright.fact_file import field_of

#: What the bytes of a library's own collectives are those of.
_LIBRARY = {"all_to_all": "pairwise", "send_recv": "direct"}


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    op: str
    dtype: str
    algorithm: str
    num_ranks: Annotated[int, Field(gt=0)]
    num_bytes: Annotated[int, Field(gt=0)]
    time_s: Annotated[float, Field(gt=0)]
    num_wrong: Annotated[int, Field(ge=0)]


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    num_ranks: Annotated[int, Field(gt=1)]
    backend: str
    rows: Annotated[list[_Row], Field(min_length=1)]


def fit_bench_files(paths: Sequence[Path], name: str, dtype: str | None = None) -> Fit:
    """Return a topology whose levels are what each file measured, innermost first.

    Args:
        paths: of the files.
        name: of the topology.
        dtype: the type of numbers whose times are fitted; may be left out where all are of one.

    Raises:
        CommsError: a name that no file may have, a file that is none of `comm bench`, the same times twice, wrong
            numbers in them, several types, or too few sizes.
        UnknownName: no such type.
    """
    raise_if_no_name(name)
    contents = [_read(path) for path in paths]
    _raise_if_twice(paths, contents)
    chosen = _one_dtype(paths, contents, dtype)
    levels, residuals, left_out = [], [], []
    for index, (path, content) in enumerate(zip(paths, contents, strict=True)):
        own, said = _rows_to_fit([row for row in content.rows if row.dtype == chosen])
        left_out += [f"{path.name}: {sentence}" for sentence in said]
        level = Level(
            kind=f"{content.backend}, {'inside a node' if index == 0 and len(paths) > 1 else 'between ranks'}",
            medium="network",
            members=content.num_ranks,
            one_way_gb_per_s=1.0,
            hop_latency_s=None,
            full_mesh=False,
            switch_reduces=False,
            is_shared=False,
            curves=(),
            source=f"comm fit {path.name}",
            certainty="measured",
        )
        found = fit_curves(_alone(name, level), own)
        fitted = found.topology.levels[0]
        # No rate of the links was read: the best that a curve reaches stands for it.
        best = max(curve.ceiling_gb_per_s for curve in fitted.curves)
        levels.append(replace(fitted, one_way_gb_per_s=best, source=level.source))
        residuals += list(found.residuals)
    mean = sum(abs(error) for _, error in residuals) / len(residuals)
    topology = replace(
        _alone(name, *levels),
        notes=(f"{len(residuals)} measured times of {chosen}, mean error of the fit {100 * mean:.1f} %", *left_out),
    )
    return Fit(topology=topology, residuals=tuple(residuals))


def _raise_if_twice(paths: Sequence[Path], contents: Sequence[_File]) -> None:
    """Each file is a level of its own: the times of one do not say what joins its nodes."""
    for index, (path, content) in enumerate(zip(paths, contents, strict=True)):
        for other, known in zip(paths[:index], contents, strict=False):
            if content == known:
                same = path.resolve() == other.resolve()
                told = f"'{path}' is given twice" if same else f"'{path}' has the very times of '{other}'"
                raise CommsError(
                    f"{told}, and each file is a level of its own; give one file for each level, innermost first"
                )


def _alone(name: str, *levels: Level) -> Topology:
    """A topology of these levels and nothing else that is known."""
    counts = tuple(level.members for level in levels)
    return Topology(name=name, aliases=(), device=None, compute_capability=None, levels=levels, counts=counts)


def _one_dtype(paths: Sequence[Path], contents: Sequence[_File], asked: str | None) -> str:
    """The type whose rows are fitted, which all files have."""
    by_file = [list(dict.fromkeys(row.dtype for row in content.rows)) for content in contents]
    everywhere = [dtype for dtype in by_file[0] if all(dtype in found for found in by_file)]
    if asked is not None:
        wanted = wire_format(asked).name
        lacking = [path for path, found in zip(paths, by_file, strict=True) if wanted not in found]
        if lacking:
            known = f"; measured in all files: {', '.join(everywhere)}" if everywhere else ""
            raise CommsError(f"'{lacking[0]}' has no times of {wanted}{known}")
        return wanted
    if not everywhere:
        raise CommsError(
            f"no type of numbers was measured in all files ({'; '.join(map(', '.join, by_file))}); measure them alike"
        )
    if any(len(found) > 1 for found in by_file):
        several = next(found for found in by_file if len(found) > 1)
        raise CommsError(f"times of {', '.join(several)} do not make one curve; choose one: --dtype {everywhere[0]}")
    return everywhere[0]


def _rows_to_fit(rows: Sequence[_Row]) -> tuple[list[Timed], list[str]]:
    """The rows of curves, and what is left out of them with its reason."""
    kept, said = [], []
    of_library = {(row.op, _LIBRARY.get(row.op, "ring")) for row in rows if row.algorithm == "library"}
    for row in rows:
        name = _LIBRARY.get(row.op, "ring") if row.algorithm == "library" else row.algorithm
        if name in ALGORITHMS and ALGORITHMS[name].needs_nodes:
            said.append(f"{row.op} by {name} crosses two levels, which its time does not tell apart; left out")
        elif row.algorithm != "library" and (row.op, name) in of_library:
            said.append(f"{row.op} by {name} stands for the library's own, which was measured too; left out")
        else:
            kept.append(Timed(op=row.op, num_bytes=row.num_bytes, time_s=row.time_s, algorithm=name))
    return kept, list(dict.fromkeys(said))


def _read(path: Path) -> _File:
    try:
        content = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CommsError(f"'{path}' cannot be read ({error.strerror}); give a file of: comm bench --out") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CommsError(f"'{path}' is no JSON ({error}); give a file of: comm bench --out") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = field_of(first)
        said = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}" if where else "the JSON in it is no object"
        raise CommsError(f"'{path}': {said}; give a file of: comm bench --out") from error
    wrong = [row for row in content.rows if row.num_wrong]
    if wrong:
        raise CommsError(
            f"'{path}' has {spell_count(wrong[0].num_wrong, 'wrong number')} in {wrong[0].op} of "
            f"{wrong[0].num_bytes} bytes by {wrong[0].algorithm}; find out why before its times are believed"
        )
    return content
