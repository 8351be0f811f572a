"""Column factors that go into the norm before: W x = (W s)(x / s), and x / s is the norm with its weight divided.

    y = norm(h) · g          y / s = norm(h) · (g / s)

So an engine that knows nothing of a transform runs the changed weights, if *every* matrix that reads the norm's output
is changed by the same factors. `models/norm_readers.py` sees who reads what; a search for an engine asks it before it
chooses, so that what is refused here comes from plans that were made for something else.

Rejected: factors of attention's last matrix that go into the rows of v, as AWQ does: those rows have codes of their
own, whose scales would be rounded again.

Legend: K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwright.export.source import ExportSource
from bitwright.models.norm_readers import norms_seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Folding:
    """What goes into norms, and what cannot."""

    #: Parameter of a norm → its values divided by the factors, fp32.
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    #: Site → why its factors go nowhere.
    refused: Mapping[str, str] = field(default_factory=dict)


def fold_factors(source: ExportSource) -> Folding:
    """Find the norms that the column factors of coded sites go into."""
    factors: dict[str, Tensor] = {}
    sites_of: dict[str, list[str]] = {}
    for site in source.coded_sites():
        scales_K = source.weight(site).transform.column_scales_K
        if scales_K is not None:
            factors[site.name] = scales_K
        sites_of.setdefault(site.module, []).append(site.name)
    if not factors:
        return Folding()
    modules_of = {name: module for module, names in sites_of.items() for name in names}
    norms = norms_seen(source.model)
    read_by = {reader: norm for norm, seen in norms.items() for reader in seen.readers}
    parameters: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    for name, scales_K in factors.items():
        norm = read_by.get(modules_of[name])
        if norm is None:
            refused[name] = "its factors have no norm to go into: what it reads comes from elsewhere"
            continue
        readers = norms[norm].readers
        unlike = [
            reader
            for reader in readers
            if not all(
                (other := factors.get(site)) is not None and torch.equal(other, scales_K)
                for site in sites_of.get(reader, [""])
            )
        ]
        if unlike:
            refused[name] = f"its factors cannot go into {norm}: {', '.join(unlike)} read it with others, or none"
            continue
        folded = norms[norm].divided(scales_K)
        if folded is None:
            refused[name] = f"its factors cannot go into {norm}, which does more than to multiply by its weight"
            continue
        parameters |= {f"{norm}.{part}": value for part, value in folded.items()}
    return Folding(parameters=parameters, refused=refused)
