"""The map of a model: one row per role, one column per layer, one cell per site, coloured by its scheme.

Rows follow the order of roles inside a layer, so a column reads as the way a token takes through it. Where one layer
has several sites of one role (experts), the cell is cut into that many stripes. Sites outside the numbered layers
(embedding, head) are listed apart; values that stay as they are have no cell. Drawn as plain SVG, because each cell
tells its site on hover.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.plan import Plan, SiteChoice
from bitwright.report.palette import ink_on
from bitwright.report.units import spell_bytes, spell_number

_LAYER = re.compile(r"\.(\d+)(?=[.:])")

CELL_WIDTH = 28
CELL_HEIGHT = 26
_GAP = 2
_LABEL_WIDTH = 92
_AXIS_HEIGHT = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A rectangle of the map, in SVG user units."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    ink: str
    #: Bits in the cell, or "" where it is too small.
    text: str
    tooltip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMap:
    """Everything the template needs to draw the map."""

    width: float
    height: float
    cells: tuple[Cell, ...]
    #: (y of the middle, role)
    rows: tuple[tuple[float, str], ...]
    #: (x of the middle, layer number)
    columns: tuple[tuple[float, int], ...]
    axis_x: float
    axis_y: float
    #: Sites outside numbered layers.
    outside: tuple[SiteChoice, ...]


def layer_of(site: SiteChoice) -> int | None:
    """Return the first number in the site's dotted name, which is its layer; None outside numbered layers."""
    match = _LAYER.search(site.name)
    return int(match[1]) if match else None


def describe_site(site: SiteChoice) -> str:
    """Return the text a cell shows on hover."""
    unit = "weight" if site.kind == "weight" else "value"
    return (
        f"{site.name}\n{site.scheme}, {site.rounding}, transform {site.transform}\n"
        f"{site.shape[0]} × {site.shape[1]}, {spell_number(site.bits)} bits per {unit}, {spell_bytes(site.bytes)}\n"
        f"predicted KL {spell_number(site.predicted_kl)}\n"
        f"{site.reason}"
    )


def build_layer_map(plan: Plan, colours: Mapping[str, str]) -> LayerMap:
    """Lay out the cells of ``plan``; ``colours`` maps scheme → ``"#rrggbb"``."""
    shown = [site for site in plan.sites if site.kind == "weight" or site.scheme != "as_loaded"]
    layers = sorted({layer for site in shown if (layer := layer_of(site)) is not None})
    column = {layer: index for index, layer in enumerate(layers)}
    roles = list(dict.fromkeys(site.role_label for site in shown if layer_of(site) is not None))
    row = {role: index for index, role in enumerate(roles)}
    places: dict[tuple[str, int], list[SiteChoice]] = {}
    outside = []
    for site in shown:
        layer = layer_of(site)
        if layer is None:
            outside.append(site)
        else:
            places.setdefault((site.role_label, layer), []).append(site)
    cells = []
    for (role, layer), sites in places.items():
        left = _LABEL_WIDTH + column[layer] * CELL_WIDTH
        top = row[role] * CELL_HEIGHT
        stripe = (CELL_HEIGHT - _GAP) / len(sites)
        for index, site in enumerate(sites):
            colour = colours[site.scheme]
            cells.append(
                Cell(
                    x=left,
                    y=round(top + index * stripe, 3),
                    width=CELL_WIDTH - _GAP,
                    height=round(stripe, 3),
                    colour=colour,
                    ink=ink_on(colour),
                    text=f"{site.bits:.0f}" if len(sites) == 1 else "",
                    tooltip=describe_site(site),
                )
            )
    every = 1 if len(layers) <= 40 else 5
    width = _LABEL_WIDTH + len(layers) * CELL_WIDTH
    return LayerMap(
        width=width,
        height=len(roles) * CELL_HEIGHT + _AXIS_HEIGHT,
        cells=tuple(cells),
        rows=tuple((row[role] * CELL_HEIGHT + (CELL_HEIGHT - _GAP) / 2, role) for role in roles),
        columns=tuple(
            (_LABEL_WIDTH + column[layer] * CELL_WIDTH + (CELL_WIDTH - _GAP) / 2, layer)
            for layer in layers
            if column[layer] % every == 0
        ),
        axis_x=_LABEL_WIDTH + len(layers) * CELL_WIDTH / 2,
        axis_y=len(roles) * CELL_HEIGHT,
        outside=tuple(outside),
    )
