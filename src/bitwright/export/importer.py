"""Import a checkpoint that somebody else quantised: its codes and scales, exactly, as a plan for the unquantised model.

    found = look(checkpoint_path, reference)         # what is in it, layer by layer, and what cannot be taken
    plan = plan_of(found, reference, …)              # `imported_plan.py`

The reference gives sites, shapes and the hash: the plan is one for it, and `verify`, `compare` and `show` work as with
any other. Every matrix under scales becomes a choice with the rounding "imported", whose tensors hold the checkpoint's
codes; what the checkpoint multiplies is what the plan runs, but for its arithmetic, which is fp32 here.

    a matrix under scales           its codes under the preset of its facts, else under the facts spelled out
    plain numbers                   as loaded, where they are the reference's; where they are those rounded to 16 bits,
                                    however wide they are stored, that format; else, where 16 bits hold them, they are
                                    kept themselves, under a scale of 1
    a norm that differs             factors of the columns behind it (`folded_scales.py`)

What fits none of these is refused by name.

Legend: N rows (out_features), K columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from bitwright.errors import BitwrightError, ModelError
from bitwright.export.checkpoint import Checkpoint, open_checkpoint
from bitwright.export.folded_scales import find_folded_scales
from bitwright.export.source_kind import SOURCES, Contents, Source
from bitwright.export.stored_matrix import SCALE_FORMATS, StoredMatrix, tensor_scheme
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site, find_sites, role_of, site_weight
from bitwright.quantize import QTensor
from bitwright.quantize.fitted import UNCHANGED, Fitted
from bitwright.quantize.granularity import TENSOR
from bitwright.quantize.scheme import TensorScheme

_EXPERT = re.compile(r"(?<=\.experts\.)\d+")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """What the checkpoint has at one site."""

    site: Site
    #: Codes; None where the weight is the reference's, as it is or rounded to `plain`.
    matrix: StoredMatrix | None = None
    #: Format that the reference's weight is rounded to; None without codes: it stays as loaded.
    plain: TensorScheme | None = None
    transform: Fitted = UNCHANGED


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """What is in a checkpoint."""

    path: Path
    #: Name of its kind.
    kind: str
    sites: tuple[Site, ...]
    taken: tuple[Taken, ...]
    #: Site or parameter → why it cannot be taken.
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def look(path: Path | str, reference: LoadedModel, *, sites: tuple[Site, ...] | None = None) -> Found:
    """Read a checkpoint against the model that it was made from.

    Args:
        path: a model folder or a .gguf file.
        reference: the unquantised model.
        sites: its weight sites; found unless given.

    Raises:
        ModelError: it cannot be read, nothing in it is quantised, it is of no known kind or of several, or its tensors
            are those of another model.
    """
    checkpoint, source = recognise(path)
    contents = source.contents(checkpoint, reference)
    known = find_sites(reference.model) if sites is None else sites
    if not contents.coded:
        raise ModelError(f"{path} has no tensor under scales, so there is nothing to import: plan for it as it is")
    parameters = {site.parameter for site in known}
    refused: dict[str, str] = {}
    changed, notes = _changed_parameters(contents, reference, parameters, refused)
    folded = find_folded_scales(reference.model, changed)
    refused |= folded.refused
    taken: list[Taken] = []
    for site in known:
        try:
            taken.append(_take(site, contents, reference, folded.transforms.get(site.module, UNCHANGED)))
        except BitwrightError as error:
            refused[site.name] = str(error)
    _raise_if_other_model(checkpoint, refused, known)
    return Found(
        path=Path(path),
        kind=source.name,
        sites=known,
        taken=tuple(taken),
        refused=refused,
        notes=(*contents.notes, *notes),
    )


def recognise(path: Path | str) -> tuple[Checkpoint, Source]:
    """Open a checkpoint and tell its kind, which needs no reference.

    Raises:
        ModelError: nothing lies there, it cannot be read, or it is of no known kind or of several.
    """
    checkpoint = open_checkpoint(path)
    return checkpoint, _source_of(checkpoint)


def _source_of(checkpoint: Checkpoint) -> Source:
    claiming = [source for source in SOURCES.values() if source.claims(checkpoint)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        raise ModelError(
            f"{checkpoint.path} is claimed by {' and '.join(source.name for source in claiming)}; its settings in "
            f"{checkpoint.settings_file} mix two kinds: give a checkpoint of one"
        )
    method = checkpoint.settings.get("quant_method")
    known = ", ".join(SOURCES)
    if method:
        raise ModelError(f"{checkpoint.path} is stored as codes of '{method}', which is not read; kinds are {known}")
    raise ModelError(
        f"{checkpoint.path} says nothing of quantisation (neither config.json nor a file beside it has settings), so "
        f"there is nothing to import: plan for it as it is. Kinds are {known}"
    )


# --- matrices ---------------------------------------------------------------------------------------------------------


def _take(site: Site, contents: Contents, reference: LoadedModel, transform: Fitted) -> Taken:
    module = _module_of(site, contents)
    weight_NK = site_weight(reference.model, site).detach()
    if module in contents.coded:
        matrix = contents.coded[module]()
        rows, columns = matrix.q.codes_NK.shape
        if site.rows is not None and rows != site.shape[0]:
            matrix = matrix.cut(*site.rows) if rows >= site.rows[1] else matrix
        if tuple(matrix.q.codes_NK.shape) != site.shape:
            raise ModelError(f"it is {[rows, columns]} in the checkpoint and {list(site.shape)} in the reference")
        _raise_if_not_finite(matrix.q)
        return Taken(site=site, matrix=matrix, transform=transform)
    plain = contents.plain.get(f"{module}.weight", contents.plain.get(site.parameter))
    if plain is None:
        raise ModelError("the checkpoint has no tensor for it")
    stored = _rows_of(plain(), site)
    if tuple(stored.shape) != site.shape:
        raise ModelError(f"it is {list(stored.shape)} in the checkpoint and {list(site.shape)} in the reference")
    return _take_plain(site, stored, weight_NK, transform)


def _take_plain(site: Site, stored_NK: Tensor, weight_NK: Tensor, transform: Fitted) -> Taken:
    """A weight without scales: the reference's, that rounded, or one of its own."""
    if not transform.is_identity:
        weight_NK = transform.weight(weight_NK)
    elif torch.equal(stored_NK.float(), weight_NK):
        return Taken(site=site)
    rounded = _rounded_as(stored_NK, weight_NK) if transform.is_identity else None
    if rounded is not None:
        return Taken(site=site, plain=TensorScheme(format=SCALE_FORMATS[rounded]))
    dtype = _narrowest(stored_NK)
    number = SCALE_FORMATS.get(dtype, str(dtype))
    if dtype.itemsize > 2 or not dtype.is_floating_point:
        raise ModelError(
            f"it is stored in {number} without scales, and is neither the reference's nor that rounded to 16 bits"
        )
    q = QTensor(
        scheme=tensor_scheme(number, TENSOR, torch.float32),
        codes_NK=stored_NK.float(),
        scales_NG=torch.ones(1, 1),
        follows_from_scales=False,
    )
    size = stored_NK.numel() * stored_NK.element_size()
    return Taken(
        site=site,
        matrix=StoredMatrix(q=q, stored_bytes=size, words=f"{number}, other numbers than the reference's"),
        transform=transform,
    )


def _rounded_as(stored: Tensor, reference: Tensor) -> torch.dtype | None:
    """The dtype that the reference has to be rounded to for what is stored, which may be wider; None: none does."""
    if not stored.is_floating_point():
        return None
    tried = (stored.dtype, *_HALVES)
    return next((t for t in tried if torch.equal(stored.float(), reference.to(t).to(stored.dtype).float())), None)


def _narrowest(stored: Tensor) -> torch.dtype:
    """The dtype that what is stored needs: exports with all else in fp32 hold 16-bit numbers too."""
    if stored.dtype.itemsize <= 2 or not stored.is_floating_point():
        return stored.dtype
    return next((half for half in _HALVES if torch.equal(stored.to(half).to(stored.dtype), stored)), stored.dtype)


def _module_of(site: Site, contents: Contents) -> str:
    """The checkpoint's module of a site: of its parameter's name, else the one of its layer, expert and role.

    transformers renames some modules and joins experts; the names that checkpoints have tell the same by their parts.
    """
    own = site.parameter.removesuffix(".weight")
    if own in contents.coded or site.parameter in contents.plain:
        return own
    fitting = [
        name
        for name in (*contents.coded, *(parameter.removesuffix(".weight") for parameter in contents.plain))
        if (_layer_of(name), _expert_of(name), role_of(name)) == (_layer_of(site.module), site.expert, site.role)
    ]
    return fitting[0] if len(fitting) == 1 else own


def _layer_of(name: str) -> str | None:
    """`model.layers.3` of a module of that layer."""
    found = _LAYER.search(name)
    return None if found is None else name[: found.end()]


def _expert_of(name: str) -> int | None:
    found = _EXPERT.search(name)
    return None if found is None else int(found.group())


def _rows_of(stored: Tensor, site: Site) -> Tensor:
    if site.expert is not None and stored.dim() == 3:
        stored = stored[site.expert]
    if site.transposed:
        stored = stored.T
    return stored if site.rows is None or stored.shape[0] == site.shape[0] else stored[site.rows[0] : site.rows[1]]


def _raise_if_not_finite(q: QTensor) -> None:
    for what, part in (("codes", q.codes_NK), ("scales", q.scales_NG), ("offsets", q.offsets_NG)):
        if part is not None and not bool(torch.isfinite(part).all()):
            raise ModelError(f"its {what} have {int((~torch.isfinite(part)).sum())} NaN or Inf; get an undamaged file")


# --- what is no matrix ------------------------------------------------------------------------------------------------


def _changed_parameters(
    contents: Contents, reference: LoadedModel, of_sites: set[str], refused: dict[str, str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Norms, biases and the like that differ from the reference's by more than their format; and notes."""
    changed: dict[str, Tensor] = {}
    rounded: dict[str, str] = {}
    for name, parameter in reference.model.named_parameters():
        if name in of_sites:
            continue
        read = contents.plain.get(name)
        if read is None:
            refused[name] = "the checkpoint has no tensor for it"
            continue
        stored = read()
        if stored.shape != parameter.shape:
            refused[name] = f"it is {list(stored.shape)} in the checkpoint and {list(parameter.shape)} in the reference"
        elif not torch.equal(stored.float(), parameter):
            dtype = _rounded_as(stored, parameter)
            if dtype is None:
                changed[name] = stored.float()
            else:
                rounded[name] = SCALE_FORMATS[dtype]
    notes = []
    if rounded:
        formats = ", ".join(sorted(set(rounded.values())))
        notes.append(
            f"rounded to {formats}, and here as in the reference: parameters that are no matrices ({len(rounded)})"
        )
    return changed, notes


def _raise_if_other_model(checkpoint: Checkpoint, refused: Mapping[str, str], sites: tuple[Site, ...]) -> None:
    """Where no matrix at all fits, the reference is another model."""
    if all(site.name in refused for site in sites):
        first = sites[0].name
        raise ModelError(
            f"nothing in {checkpoint.path} fits the reference, such as {first}: {refused[first]}; give the model that "
            "it was quantised from with --reference"
        )


def raise_if_refused(found: Found) -> None:
    """Raise ModelError, with every name and reason, unless all of a checkpoint can be taken."""
    if not found.refused:
        return
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.refused.items():
        by_reason.setdefault(reason, []).append(name)
    lines = [f"  {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    raise ModelError(
        f"{found.path} has what no plan for the reference can express (tensors: {len(found.refused)}); with "
        "--partial it stays as the reference has it:\n" + "\n".join(lines)
    )


def without_refused(found: Found) -> Found:
    """The same with what was refused left as the reference has it, said in its notes."""
    kept = [Taken(site=site) for site in found.sites if site.name in found.refused]
    taken = {item.site.name: item for item in (*found.taken, *kept)}
    shown = ", ".join(list(found.refused)[:5]) + (", …" if len(found.refused) > 5 else "")
    note = f"left out, so that the reference's stay: {shown} (tensors: {len(found.refused)})"
    return replace(
        found,
        taken=tuple(taken[site.name] for site in found.sites),
        refused={},
        notes=(*found.notes, note) if found.refused else found.notes,
    )
