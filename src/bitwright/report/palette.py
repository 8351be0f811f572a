"""One colour per scheme, from few bits (warm) to many (cool).

Anchors are those of Paul Tol's diverging scheme "sunset" without its pale middle (P. Tol, *Colour Schemes*, SRON
technical note SRON/EPS/TN/09-002, issue 3.2, §3): distinct for the common kinds of colour blindness, and ordered, so
that the map can be read as a landscape of bits. Nothing is told by colour alone: cells and legends also carry text.
"""

from __future__ import annotations

from collections.abc import Sequence

_ANCHORS = ("#A50026", "#DD3D2D", "#F67E4B", "#FDB366", "#FEDA8B", "#98CAE1", "#6EA6CD", "#4A7BB7", "#364B9A")

#: Position of the first and last scheme among the anchors, by number of schemes; more than six use the whole range.
_ENDS = {1: (6.0, 6.0), 2: (2.5, 7.0), 3: (2.0, 7.5), 4: (2.0, 7.5), 5: (1.5, 8.0), 6: (1.0, 8.0)}


def scheme_colours(schemes: Sequence[str]) -> dict[str, str]:
    """Return scheme → ``"#rrggbb"`` for ``schemes`` ordered from the fewest bits to the most."""
    first, last = _ENDS.get(len(schemes), (0.0, len(_ANCHORS) - 1.0))
    step = (last - first) / max(len(schemes) - 1, 1)
    return {scheme: _colour_at(first + index * step) for index, scheme in enumerate(schemes)}


def ink_on(colour: str) -> str:
    """Return black or white, whichever contrasts more with ``colour`` (WCAG 2.2 relative luminance)."""
    red, green, blue = (_linear(channel / 255) for channel in _rgb(colour))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#16181d" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _colour_at(position: float) -> str:
    index = min(int(position), len(_ANCHORS) - 2)
    share = position - index
    mixed = (
        round(low + (high - low) * share)
        for low, high in zip(_rgb(_ANCHORS[index]), _rgb(_ANCHORS[index + 1]), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
