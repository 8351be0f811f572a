"""NVIDIA Transformer Engine: a recipe for each layer, as data and as Python; it rounds weights and inputs itself.

    te_recipe.json    recipes (class and fields), layer → recipe, and the hash of the weights that they were chosen for
    te_recipe.py      the same as objects, and `recipe_of(layer)`, `autocast(layer)`

Transformer Engine keeps weights in 16 or 32 bits and finds codes and scales on every call, under the recipe of the
`autocast` around it. A plan suits it where that gives the plan's own codes: rounding to nearest, no transform, and the
scales of a recipe:

    scheme                                               recipe
    fp8_e4m3 per tensor, inputs too                      Float8CurrentScaling, scale amax / 448
    fp8_e4m3 in blocks of 128 × 128, inputs 1 × 128      Float8BlockScaling, powers of two, or fp32 scales
    mxfp8                                                MXFP8BlockScaling: scales are rounded up, where OCP's (and the
                                                         plan's) are rounded down; a note says so
    nvfp4                                                NVFP4BlockScaling, in one dimension, without rotation and
                                                         stochastic rounding, which are for training

Layers without codes are outside: recipe None. Shapes have to be multiples of 16, blocks of theirs.

Source: transformer_engine 2.20.2, common/recipe/__init__.py (fields and their documentation), pytorch/utils.py
(assert_dim_for_fp8_exec). Nothing was run on a GPU.
Rejected: DelayedScaling, whose scales follow from a history of steps and not from calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.export.site_names import spell_sites
from bitwright.export.source import ExportSource
from bitwright.export.written_folder import write_json
from bitwright.plan import Plan, SiteChoice
from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme

JSON_FILE, PYTHON_FILE = "te_recipe.json", "te_recipe.py"
_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """A recipe class with its fields, and the scheme that it computes."""

    name: str
    #: Field → value; an enum's member is written as "Format.E4M3".
    fields: Mapping[str, Any]
    #: A scheme with the weights and inputs that it computes.
    scheme: str
    #: What it does otherwise than the plan; "" where nothing.
    differs: str = ""


_E4M3 = {"fp8_format": "Format.E4M3"}
_RECIPES = (
    _Recipe(
        name="Float8CurrentScaling",
        fields={**_E4M3, "use_power_2_scales": False},
        scheme="fp8_e4m3:tensor:fp32|fp8_e4m3:tensor:fp32",
    ),
    _Recipe(name="Float8BlockScaling", fields={**_E4M3, "use_f32_scales": False}, scheme="fp8_block"),
    _Recipe(
        name="Float8BlockScaling",
        fields={**_E4M3, "use_f32_scales": True},
        scheme="fp8_e4m3:b128x128:fp32|fp8_e4m3:g128:fp32",
    ),
    _Recipe(
        name="MXFP8BlockScaling",
        fields=_E4M3,
        scheme="mxfp8",
        differs="rounds scales up, where the plan rounds them down as OCP MX does",
    ),
    _Recipe(
        name="NVFP4BlockScaling",
        fields={"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True},
        scheme="nvfp4",
    ),
)


@dataclass(frozen=True, slots=True)
class TransformerEngine:
    """See the opening of this file."""

    name: str = "transformer-engine"
    description: str = "a recipe for each layer, as JSON and Python, for NVIDIA Transformer Engine"
    engines: tuple[str, ...] = ()
    loaded_by: tuple[str, ...] = ("Transformer Engine",)
    keeps_caches: bool = False

    def why_not(self, choice: SiteChoice, scheme: Scheme | ValueScheme) -> str | None:
        """See `Exporter`."""
        if isinstance(scheme, ValueScheme):
            return None if scheme.values.scaling is None else "recipes here are of layers, and round no values"
        if scheme.weights is None or scheme.weights.scaling is None:
            return None
        found = _recipe_of(scheme)
        if found is None:
            return f"Transformer Engine has no recipe for weights {scheme.weights} with inputs {_spell_inputs(scheme)}"
        if ROUNDINGS[choice.rounding].needs_data:
            return f"Transformer Engine rounds weights itself, to nearest, and takes no codes of {choice.rounding}"
        if TRANSFORMS[choice.transform].parts:
            return f"Transformer Engine changes no inputs, which {choice.transform} needs"
        block_rows = scheme.weights.scaling.granularity.block_rows or _MULTIPLE
        columns = max(scheme.weights.scaling.granularity.group_size, _MULTIPLE)
        if choice.shape[0] % block_rows or choice.shape[1] % columns:
            return (
                f"{found.name} takes rows that are multiples of {block_rows} and columns of {columns}, "
                f"not {choice.shape[0]} × {choice.shape[1]}"
            )
        return None

    def why_not_plan(self, plan: Plan) -> str | None:
        """See `Exporter`."""
        return None

    def why_not_model(self, source: ExportSource) -> Mapping[str, str]:
        """See `Exporter`."""
        fused = "it is a part of one matrix, whose recipe would be that of all its rows"
        return {site.name: fused for site in source.coded_sites() if site.rows is not None or site.expert is not None}

    def write(self, source: ExportSource, folder: Path) -> tuple[str, ...]:
        """See `Exporter`."""
        recipes: dict[str, _Recipe] = {}
        layers: dict[str, str | None] = {}
        for site in source.sites:
            weight = source.weight(site)
            found = _recipe_of(weight.scheme) if weight.has_codes else None
            layers[site.module] = None if found is None else weight.scheme.name
            if found is not None:
                recipes[weight.scheme.name] = found
        content = {
            "model": {"name": source.loaded.name, "hash": source.loaded.hash},
            "recipes": {scheme: {"class": r.name, "fields": dict(r.fields)} for scheme, r in recipes.items()},
            "layers": layers,
        }
        write_json(folder / JSON_FILE, content)
        (folder / PYTHON_FILE).write_text(_python(recipes, layers), encoding="utf-8")
        return tuple(
            f"{recipe.name} {recipe.differs}: {spell_sites(name for name, used in layers.items() if used == scheme)}"
            for scheme, recipe in recipes.items()
            if recipe.differs
        )


def _recipe_of(scheme: Scheme) -> _Recipe | None:
    if scheme.static_activations:
        return None
    asked = (scheme.weights, scheme.activations)
    return next((r for r in _RECIPES if (SCHEMES[r.scheme].weights, SCHEMES[r.scheme].activations) == asked), None)


def _spell_inputs(scheme: Scheme) -> str:
    if scheme.activations is None:
        return "that are not rounded"
    return f"{scheme.activations}{' and static' if scheme.static_activations else ''}"


def _python(recipes: Mapping[str, _Recipe], layers: Mapping[str, str | None]) -> str:
    """The text of te_recipe.py."""
    classes = sorted({recipe.name for recipe in recipes.values()})
    made = "\n".join(f"    {scheme!r}: {_call(recipe)}," for scheme, recipe in recipes.items())
    listed = "\n".join(f"    {layer!r}: {scheme!r}," for layer, scheme in layers.items())
    return f'''"""Recipes of Transformer Engine, layer by layer.

    with autocast("model.layers.0.mlp.up_proj"):
        y = layer(x)                                   # a transformer_engine.pytorch.Linear
"""

from transformer_engine.common.recipe import {", ".join(["Format", *classes])}

#: Scheme of the plan → recipe.
RECIPES = {{
{made}
}}
#: Layer → scheme; None stays in the model's own precision.
LAYERS = {{
{listed}
}}


def recipe_of(layer):
    """The recipe of a layer; None outside of every recipe."""
    scheme = LAYERS.get(layer)
    return None if scheme is None else RECIPES[scheme]


def autocast(layer):
    """Context in which a layer of Transformer Engine computes as planned."""
    import transformer_engine.pytorch as te

    recipe = recipe_of(layer)
    return te.autocast(enabled=recipe is not None, recipe=recipe)
'''


def _call(recipe: _Recipe) -> str:
    fields = ", ".join(f"{name}={value}" for name, value in recipe.fields.items())
    return f"{recipe.name}({fields})"


EXPORTERS = (TransformerEngine(),)
