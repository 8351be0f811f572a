"""One serving engine = one TOML file in `engines/`; the folder is the list. No code branches on an engine's name.

    name = "vllm"                    # canonical; `aliases` are accepted at the borders
    plain_formats = ["fp16", "bf16"] # weights and values that it runs without any scale
    kept_roles = ["router"]          # sites that stay in a plain format, whatever is asked
    fp32_roles = ["attn.softmax_sum"]# values that it computes in fp32, whatever is asked
    cache_ties = "all"               # which caches share a scheme: "all" | "part" (all keys, all values) | "none"

    [[fused]]                        # roles that one kernel computes at once: their sites share a scheme
    [[weights]]                      # a kind of weights (and activations) that it runs; a scheme has to fit one
    [[values]]                       # a kind of rounded values or cache that it runs
    [[transforms]]                   # changes of the inputs that it can apply, and at which roles

A kind may say which devices it has kernels on: `device_kinds`, `min_compute_capability`, `max_compute_capability`,
`cpu_flags`. Two kinds of one name's weights may differ in nothing else but that and the sizes that they take.

Every section says `source` and `certainty` as device files do. A kind is a pattern over the facts of a scheme
(`quantize/scheme.py`, `quantize/value_scheme.py`); a list that is empty allows anything. What fits no kind is refused
with the reason of the kind that came closest (`rules.py`).

The records are frozen pydantic models, since the file is their only maker. `engines()` reads the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright import formats
from bitwright.catalog import FileCatalog, nearest_name_hint
from bitwright.errors import PlanError
from bitwright.fact_file import parse_facts
from bitwright.hardware.device import Kind

Certainty = Literal["read", "recalled", "derived", "measured"]
Text = Annotated[str, Field(min_length=1)]
Names = tuple[Text, ...]
Sizes = tuple[Annotated[int, Field(gt=0)], ...]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("formats", "scale_formats", "activations", "plain_formats", check_fields=False)
    @classmethod
    def _raise_if_unknown_format(cls, value: Names) -> Names:
        for name in value:
            if name not in formats.FORMATS:
                raise ValueError(f"no format is named {name!r}{nearest_name_hint(name, list(formats.names()))}")
        return value


class _Sourced(_Record):
    source: Text
    certainty: Certainty


class Fused(_Sourced):
    """Roles whose sites are computed by one kernel and share a scheme."""

    roles: Annotated[Names, Field(min_length=2)]
    #: Component of a site's name that ends what they share ("experts"); None: the module that they are children of.
    within: str | None = None


class _HasKernels(_Sourced):
    """Devices on which an engine has kernels for a kind. What a device file does not know, rules nothing out."""

    #: Empty: all that the engine runs on.
    device_kinds: tuple[Kind, ...] = ()
    #: Of NVIDIA's GPUs, major.minor, both ends included.
    min_compute_capability: Annotated[float, Field(gt=0)] | None = None
    max_compute_capability: Annotated[float, Field(gt=0)] | None = None
    #: Instruction sets that a processor has to have.
    cpu_flags: Names = ()


class WeightKind(_HasKernels):
    """A kind of quantised weights that an engine multiplies by, and of activations to go with it."""

    #: What the engine calls it.
    name: Text
    formats: Annotated[Names, Field(min_length=1)]
    #: Who shares a scale: tensor, row, group, block.
    scopes: Annotated[tuple[Literal["tensor", "row", "group", "block"], ...], Field(min_length=1)]
    #: Columns under one scale, for groups and blocks.
    group_sizes: Sizes = ()
    #: Rows under one scale, for blocks.
    block_rows: Sizes = ()
    symmetries: tuple[Literal["symmetric", "zero_point", "minimum"], ...] = ("symmetric",)
    scale_formats: Names = ()
    #: Two-level scaling, as NVFP4 has it.
    tensor_scale: bool = False
    #: Whether a group's scale may be negative (ggml's Q4_0 stores such).
    negative_scales: bool = False
    #: Whether a last group may be shorter than the others.
    ragged_groups: bool = False
    in_features_multiple: Annotated[int, Field(gt=0)] = 1
    out_features_multiple: Annotated[int, Field(gt=0)] = 1
    #: Formats that the input is rounded to; empty: it is not rounded.
    activations: Names = ()
    activation_scopes: tuple[Literal["tensor", "row", "group", "block"], ...] = ()
    activation_group_sizes: Sizes = ()
    activation_timings: tuple[Literal["dynamic", "static"], ...] = ("dynamic",)
    #: Roles of sites at which it does not run.
    refused_roles: Names = ()
    #: Whether it loads only where all matrices with codes are under one scheme.
    alone: bool = False


class ValueKind(_HasKernels):
    """A kind of rounded values that an engine computes with, or caches."""

    name: Text
    roles: Annotated[Names, Field(min_length=1)]
    formats: Annotated[Names, Field(min_length=1)]
    axes: Annotated[tuple[Literal["tensor", "head", "token", "channel"], ...], Field(min_length=1)]
    #: Numbers under one scale along the axis; empty: any number, one scale for all of them included.
    group_sizes: Sizes = ()
    symmetries: tuple[Literal["symmetric", "zero_point", "minimum"], ...] = ("symmetric",)
    scale_formats: Names = ()
    #: How the cast rounds, names of `formats.ROUNDINGS`.
    roundings: Names = ("nearest_even",)

    @field_validator("roundings")
    @classmethod
    def _raise_if_unknown_rounding(cls, value: Names) -> Names:
        for name in value:
            if name not in formats.ROUNDINGS:
                raise ValueError(f"no rounding is named {name!r}{nearest_name_hint(name, list(formats.ROUNDINGS))}")
        return value


class TransformKind(_Sourced):
    """A change of inputs that an engine applies at run time, or that can be folded into what comes before."""

    #: What a transform stores (`Transform.parts`) that this takes.
    parts: Annotated[Names, Field(min_length=1)]
    #: Roles of sites at which it can; empty: all.
    roles: Names = ()
    how: Text
    #: Whether factors go into the norm before: then all that read it have to have the same ones (`search/choices.py`).
    folded: bool = False


class Engine(_Record):
    """What one serving engine runs."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    aliases: Names = ()
    #: What it is, and which release the file speaks of.
    description: Text
    plain_formats: Annotated[Names, Field(min_length=1)]
    kept_roles: Names = ()
    fp32_roles: Names = ()
    #: Kinds of devices that it runs on at all; empty: any.
    device_kinds: tuple[Kind, ...] = ()
    #: False: all quantised sites of a model share one scheme.
    mixes_schemes: bool = True
    cache_ties: Literal["all", "part", "none"] = "none"
    #: What it loads codes of besides linear modules: "experts", a matrix each, that models have as one parameter;
    #: "in_out": matrices that are stored [in, out].
    coded_modules: tuple[Literal["experts", "in_out"], ...] = ()
    notes: Names = ()
    source: Text
    certainty: Certainty
    fused: tuple[Fused, ...] = ()
    weights: tuple[WeightKind, ...] = ()
    values: tuple[ValueKind, ...] = ()
    transforms: tuple[TransformKind, ...] = ()


def engines() -> tuple[Engine, ...]:
    """Return every engine, sorted by name."""
    return tuple(_ENGINES.records[name] for name in _ENGINES.names)


def get_engine(name: str) -> Engine:
    """Return an engine by its name or an alias; case does not matter.

    Raises:
        UnknownName: no engine has that name; the nearest one is suggested.
        PlanError: a file of the folder is wrong.
    """
    return _ENGINES.get(name)


def read_engine(text: str, file: str) -> Engine:
    """Return the engine of a file's text; `file` is what errors call it.

    Raises:
        PlanError: no TOML, or a field is missing, unknown or impossible; the message names file and field.
    """
    return parse_facts(text.encode("utf-8"), file, Engine, kind="engine", error=PlanError)


def read_engine_file(path: str | Path) -> Engine:
    """Read and check one engine file of a user's. Raises PlanError as `read_engine` does, or if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"engine file '{path}' cannot be read ({error}); give the path of a .toml file") from error
    return read_engine(text, str(path))


_ENGINES: FileCatalog[Engine] = FileCatalog(
    kind="engine",
    package="bitwright.plan",
    folder="engines",
    read=lambda content, file: read_engine(content.decode("utf-8"), file),
    aliases=lambda engine: engine.aliases,
    error=PlanError,
)
