"""The file that `comm bench --out` writes, read again and fitted: one file for each level, innermost first.

A library's own collective is taken for the algorithm that it is known to use where there is one choice of bytes: rings
for all-reduce, all-gather and reduce-scatter, pairwise for all-to-all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright.comms.fit import Fit, Timed, fit_curves
from bitwright.comms.topology import Level, Topology
from bitwright.errors import CommsError

#: What the bytes of a library's own collectives are those of.
_LIBRARY = {"all_to_all": "pairwise", "send_recv": "direct"}


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    op: str
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


def fit_bench_files(paths: Sequence[Path], name: str) -> Fit:
    """Return a topology whose levels are what each file measured, innermost first.

    Raises:
        CommsError: a file that is none of `comm bench`, wrong numbers in it, or too few sizes.
    """
    levels, residuals, counts = [], [], []
    for index, path in enumerate(paths):
        content = _read(path)
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
        alone = Topology(
            name=name,
            aliases=(),
            device=None,
            compute_capability=None,
            levels=(level,),
            counts=(content.num_ranks,),
        )
        found = fit_curves(alone, _timed(content))
        fitted = found.topology.levels[0]
        # No rate of the links was read: the best that a curve reaches stands for it.
        best = max(curve.ceiling_gb_per_s for curve in fitted.curves)
        levels.append(replace(fitted, one_way_gb_per_s=best, source=level.source))
        residuals += list(found.residuals)
        counts.append(content.num_ranks)
    mean = sum(abs(error) for _, error in residuals) / len(residuals)
    topology = Topology(
        name=name,
        aliases=(),
        device=None,
        compute_capability=None,
        levels=tuple(levels),
        notes=(f"{len(residuals)} measured times, mean error of the fit {100 * mean:.1f} %",),
        counts=tuple(counts),
    )
    return Fit(topology=topology, residuals=tuple(residuals))


def _timed(content: _File) -> list[Timed]:
    return [
        Timed(
            op=row.op,
            num_bytes=row.num_bytes,
            time_s=row.time_s,
            algorithm=_LIBRARY.get(row.op, "ring") if row.algorithm == "library" else row.algorithm,
        )
        for row in content.rows
    ]


def _read(path: Path) -> _File:
    try:
        content = _File.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise CommsError(f"'{path}' cannot be read ({error.strerror}); give a file of: comm bench --out") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CommsError(f"'{path}' is no JSON ({error}); give a file of: comm bench --out") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CommsError(f"'{path}': {where}: {first['msg'].lower()}; give a file of: comm bench --out") from error
    wrong = [row for row in content.rows if row.num_wrong]
    if wrong:
        raise CommsError(
            f"'{path}' has {wrong[0].num_wrong} wrong numbers in {wrong[0].op} of {wrong[0].num_bytes} bytes by "
            f"{wrong[0].algorithm}; find out why before its times are believed"
        )
    return content
