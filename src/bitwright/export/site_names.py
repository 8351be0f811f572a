"""Many names of sites in few words: those that differ in one of their numbers alone are one entry.

model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj, model.layers.3.mlp.up_proj
model.layers.{0-1,3}.mlp.up_proj

Layers come first, then the experts in them: model.layers.{0-1}.mlp.experts.{0-7}.down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: A number between dots, or several that are one entry already.
_NUMBERS = re.compile(r"(?<=\.)(?:\d+|\{[\d,-]+\})(?=[.:]|$)")


def spell_sites(names: Iterable[str]) -> str:
    """All names, in order of appearance, those of one kind together."""
    spelled = list(names)
    for place in range(max((len(_NUMBERS.findall(name)) for name in spelled), default=0)):
        spelled = _merged(spelled, place)
    return ", ".join(spelled)


def _merged(names: Iterable[str], place: int) -> list[str]:
    """Names that differ in their number at a place alone as one."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = list(_NUMBERS.finditer(name))[place : place + 1]
        if not found or not found[0].group().isdigit():
            numbers.setdefault((name, ""), [])
        else:
            key = (name[: found[0].start()], name[found[0].end() :])
            numbers.setdefault(key, []).append(int(found[0].group()))
    return [
        f"{before}{_spell(of_kind)}{behind}" if of_kind else before for (before, behind), of_kind in numbers.items()
    ]


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
