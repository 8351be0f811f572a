"""Many names of sites in few words: those that differ in the number of their layer alone are one entry.

model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj, model.layers.3.mlp.up_proj
model.layers.{0-1,3}.mlp.up_proj
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=[.:]|$)")


def spell_sites(names: Iterable[str]) -> str:
    """All names, in order of appearance, layers of one kind together."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        if found is None:
            layers.setdefault((name, ""), [])
        else:
            layers.setdefault((name[: found.start()], name[found.end() :]), []).append(int(found.group()))
    return ", ".join(
        f"{before}{_spell(numbers)}{behind}" if numbers else before for (before, behind), numbers in layers.items()
    )


def _spell(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) + "}"
