"""Export a plan: everything that can be refused is refused before a file exists.

    findings = examine(plan, "compressed-tensors")            # of the plan alone: what `export --list PLAN` shows
    report = export(plan, loaded, "compressed-tensors", out)  # refuses, or writes the whole folder

A plan suits an exporter if its checkpoint can hold every choice (`Exporter.why_not`) and the engine that will load it
runs them (`plan/rules.py`), fused kernels included. The engine is the one asked for, else the plan's own, else the
exporter's first.

The folder is assembled beside its place and renamed: half of an export never exists, and what is there is never
replaced.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bitwright.errors import ExportError
from bitwright.export.exporter import EXPORTERS, Exporter
from bitwright.export.site_names import spell_sites
from bitwright.export.source import ExportSource, open_source
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.plan import Plan, SiteChoice
from bitwright.plan.engine import Engine, get_engine
from bitwright.plan.rules import runs_alone, ties, why_not
from bitwright.plan.whole_folder import assembled_folder
from bitwright.quantize import SCHEMES, TRANSFORMS
from bitwright.quantize.catalogs import VALUE_SCHEMES
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.value_scheme import ValueScheme

#: Role and part of the value site that examples of caches are.
_CACHE = ("kv_cache", "k_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """One reason, and the sites where it holds."""

    reason: str
    #: Names, in the order of the plan; empty where it concerns the plan as a whole.
    sites: tuple[str, ...]
    #: "int4_g128" …; more than one where the reason is the same.
    schemes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What stands against an export of a plan."""

    to: str
    #: Name of the engine whose rules were asked; None where none loads it.
    engine: str | None
    #: Why this engine.
    engine_reason: str
    refused: tuple[Refused, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written."""

    to: str
    engine: str | None
    engine_reason: str
    folder: Path
    #: File name → bytes.
    files: Mapping[str, int]
    #: dtype of what has no codes, and why.
    dtype: str
    dtype_reason: str
    notes: tuple[str, ...]


def examine(plan: Plan, to: str, *, engine: str | None = None) -> Findings:
    """What stands against exporting a plan, as far as the plan tells.

    Args:
        plan: any.
        to: name of an exporter.
        engine: name or alias of an engine that loads what it writes; None: see the opening of this file.

    Raises:
        UnknownName: there is no such exporter or engine.
        ExportError: the engine does not load what this exporter writes.
    """
    exporter = EXPORTERS[to]
    chosen, reason = _engine_of(exporter, plan, engine)
    found = [*_site_reasons(plan, exporter, chosen), *_tie_reasons(plan, chosen), *_mixing_reasons(plan, chosen)]
    whole = exporter.why_not_plan(plan)
    refused = _grouped(found)
    if whole is not None:
        refused = (*refused, Refused(reason=whole, sites=()))
    return Findings(
        to=exporter.name, engine=None if chosen is None else chosen.name, engine_reason=reason, refused=refused
    )


def examine_model(
    plan: Plan,
    model: LoadedModel,
    to: str,
    *,
    engine: str | None = None,
    sites: Sequence[Site] | None = None,
) -> Findings:
    """What stands against it once the model is looked at too: fused weights, norms; all that `export` would refuse.

    Args:
        plan: for this model.
        model: as loaded.
        to: name of an exporter.
        engine: as in `examine`.
        sites: the model's weight sites; found unless given.

    Raises:
        UnknownName, ExportError: as `examine`.
        PlanError: the plan is for another model, or its tensors are incomplete.
    """
    findings = examine(plan, to, engine=engine)
    if findings.refused:  # what has no codes there is not asked how it is stored
        return findings
    return replace(findings, refused=_model_reasons(EXPORTERS[to], _source_of(plan, model, findings, sites, None)))


def raise_if_refused(plan: Plan, to: str, *, engine: str | None = None) -> Findings:
    """Raise ExportError, naming every site and its reason, if something stands against an export; see `examine`."""
    findings = examine(plan, to, engine=engine)
    _raise_if_refused(findings, len(plan.sites))
    return findings


def export(
    plan: Plan,
    model: LoadedModel,
    to: str,
    out: str | os.PathLike[str],
    *,
    engine: str | None = None,
    dtype: str | None = None,
    sites: Sequence[Site] | None = None,
) -> ExportReport:
    """Write a plan as an engine's checkpoint.

    Args:
        plan: for this model.
        model: as loaded.
        to: name of an exporter.
        out: a folder that does not exist yet.
        engine: as in `examine`.
        dtype: fp16, bf16 or fp32 for what has no codes; None: that of the checkpoint (`source.choose_dtype`).
        sites: the model's weight sites; found unless given.

    Raises:
        ExportError: something cannot be expressed (every site is named with its reason), `out` exists, or writing
            fails; nothing is left behind.
        PlanError: the plan is for another model, or its tensors are incomplete.
        UnknownName: there is no such exporter or engine.
    """
    target = Path(os.path.realpath(out))
    raise_if_not_new(target)
    exporter = EXPORTERS[to]
    findings = raise_if_refused(plan, to, engine=engine)
    source = _source_of(plan, model, findings, sites, dtype)
    _raise_if_refused(replace(findings, refused=_model_reasons(exporter, source)), len(plan.sites))
    notes = _written(exporter, source, target)
    return ExportReport(
        to=exporter.name,
        engine=findings.engine,
        engine_reason=findings.engine_reason,
        folder=target,
        files={path.relative_to(target).as_posix(): path.stat().st_size for path in _files_of(target)},
        dtype=str(source.dtype).removeprefix("torch."),
        dtype_reason=source.dtype_reason,
        notes=notes,
    )


def supported_schemes(to: str, engine: str | None = None) -> tuple[str, ...]:
    """Schemes of weights, and of caches, that an exporter can write for an engine at a large matrix of an MLP.

    Args:
        to: name of an exporter.
        engine: one of those that load what it writes; None: whatever the checkpoint holds.
    """
    exporter = EXPORTERS[to]
    asked: dict[str, Scheme | ValueScheme] = {name: scheme for name, scheme in SCHEMES.items() if scheme.weights}
    if exporter.keeps_caches:
        asked |= {name: s for name, s in VALUE_SCHEMES.items() if s.fits(*_CACHE) and s.values.scaling is not None}
    rules = None if engine is None else get_engine(engine)
    return tuple(
        name for name, scheme in asked.items() if _site_reason(_example(scheme), scheme, exporter, rules) is None
    )


def raise_if_not_new(target: Path) -> None:
    """Raise ExportError unless nothing, or an empty folder, is at `target`. Call it before long work."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise ExportError(f"'{target}' exists, and an export replaces nothing; choose another --out, or move it away")
    ancestor = target.absolute().parent
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        why = "no permission to write in" if ancestor.is_dir() else "no folder at"
        raise ExportError(f"cannot export to '{target}': {why} '{ancestor}'; choose another --out")


def _written(exporter: Exporter, source: ExportSource, target: Path) -> tuple[str, ...]:
    try:
        with assembled_folder(target) as folder:
            return exporter.write(source, folder)
    except OSError as error:
        # NumPy tells of a disk that took less than it was given without an error of the system
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)
        why = error.strerror or f"the disk, or that of temporary files, took less than it was given ({error})"
        raise ExportError(
            f"could not write the export to '{target}': {why}; nothing was written: "
            f"{'free some space' if is_full else 'see to that'} or choose another --out"
        ) from error


def _files_of(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --- what stands against it -------------------------------------------------------------------------------------------


def _source_of(
    plan: Plan, model: LoadedModel, findings: Findings, sites: Sequence[Site] | None, dtype: str | None
) -> ExportSource:
    engine = None if findings.engine is None else get_engine(findings.engine)
    return open_source(plan, model, sites=sites, dtype=dtype, engine=engine)


def _model_reasons(exporter: Exporter, source: ExportSource) -> tuple[Refused, ...]:
    """What only the model shows."""
    return _grouped((source.plan.site(name), reason) for name, reason in exporter.why_not_model(source).items())


def _engine_of(exporter: Exporter, plan: Plan, asked: str | None) -> tuple[Engine | None, str]:
    """The engine whose rules hold, and why."""
    if asked is not None:
        engine = get_engine(asked)
        if engine.name not in exporter.engines:
            raise ExportError(
                f"{engine.name} does not load what '{exporter.name}' writes; "
                f"{'that is for ' + ', '.join(exporter.loaded_by) if exporter.engines else 'leave --engine out'}"
            )
        return engine, "asked for"
    planned = None if plan.options is None or plan.options.engine is None else get_engine(plan.options.engine)
    if planned is not None and planned.name in exporter.engines:
        return planned, "the engine that the plan was made for"
    if exporter.engines:
        return get_engine(exporter.engines[0]), f"what '{exporter.name}' is written for, unless told otherwise"
    return None, "no engine has rules for it"


def _site_reasons(plan: Plan, exporter: Exporter, engine: Engine | None) -> Iterable[tuple[SiteChoice, str]]:
    for choice in plan.sites:
        if choice.scheme == "as_loaded":
            continue
        scheme = SCHEMES[choice.scheme] if choice.kind == "weight" else VALUE_SCHEMES[choice.scheme]
        reason = _site_reason(choice, scheme, exporter, engine)
        if reason is not None:
            yield choice, reason


def _site_reason(
    choice: SiteChoice, scheme: Scheme | ValueScheme, exporter: Exporter, engine: Engine | None
) -> str | None:
    reason = exporter.why_not(choice, scheme)
    if reason is None and engine is not None:
        reason = why_not(choice, scheme, engine=engine, transform=TRANSFORMS[choice.transform])
    return reason


def _example(scheme: Scheme | ValueScheme) -> SiteChoice:
    """A choice of a scheme at a site that asks for nothing special."""
    is_weight = isinstance(scheme, Scheme)
    return SiteChoice(
        name="layers.0.mlp.up_proj" if is_weight else "layers.0.self_attn:k_cache",
        kind="weight" if is_weight else "state",
        role="mlp.up" if is_weight else _CACHE[0],
        module="layers.0.mlp.up_proj" if is_weight else "layers.0.self_attn",
        rows=None,
        tied_group=None,
        shape=(4096, 4096) if is_weight else (8, 128),
        scheme=scheme.name,
        rounding="rtn",
        transform="none",
        reason="an example",
        bytes=0,
        bits=0,
        predicted_kl=0,
    )


def _tie_reasons(plan: Plan, engine: Engine | None) -> Iterable[tuple[SiteChoice, str]]:
    """Sites that one kernel computes and that disagree."""
    groups: dict[str, list[SiteChoice]] = {}
    tied = ties(plan.sites, engine)
    for choice in plan.sites:
        if choice.name in tied:
            groups.setdefault(tied[choice.name], []).append(choice)
    for members in groups.values():
        schemes = list(dict.fromkeys(choice.scheme for choice in members))
        if len(schemes) > 1:
            parts = _listed([choice.role for choice in members])
            together = f"{parts} are one stored matrix" if engine is None else f"{engine.name} computes {parts} at once"
            for choice in members:
                yield choice, f"{together}, under one scheme, and the plan gives them several"
        elif engine is not None:
            yield from _seam_reasons(members, engine)


def _mixing_reasons(plan: Plan, engine: Engine | None) -> Iterable[tuple[SiteChoice, str]]:
    """Schemes that an engine loads where there is no other, in a plan that has others."""
    coded = [choice for choice in plan.sites if choice.kind == "weight" and _has_codes(SCHEMES[choice.scheme])]
    if engine is None or len({choice.scheme for choice in coded}) < 2:
        return
    for choice in coded:
        if runs_alone(SCHEMES[choice.scheme], engine):
            yield choice, f"{engine.name} loads {choice.scheme} only where it is the one scheme with codes"


def _has_codes(scheme: Scheme) -> bool:
    return scheme.weights is not None and scheme.weights.scaling is not None


def _seam_reasons(members: Sequence[SiteChoice], engine: Engine) -> Iterable[tuple[SiteChoice, str]]:
    """Parts of one matrix in an engine's memory: blocks of several rows must end where a part ends."""
    weights = None if members[0].kind != "weight" else SCHEMES[members[0].scheme].weights
    rows = 0 if weights is None or weights.scaling is None else weights.scaling.granularity.block_rows
    short = [choice for choice in members[:-1] if rows and choice.shape[0] % rows]
    for choice in members if short else ():
        parts = _listed([f"{part.shape[0]} rows of {part.role}" for part in short])
        yield (
            choice,
            f"{engine.name} computes {_listed([member.role for member in members])} as one matrix, in which blocks of "
            f"{rows} rows do not end with the {parts}",
        )


def _listed(parts: Sequence[str]) -> str:
    """a, b and c; each once."""
    *most, last = dict.fromkeys(parts)
    return f"{', '.join(most)} and {last}" if most else last


def _grouped(found: Iterable[tuple[SiteChoice, str]]) -> tuple[Refused, ...]:
    sites: dict[str, list[SiteChoice]] = {}
    for choice, reason in found:
        sites.setdefault(reason, []).append(choice)
    return tuple(
        Refused(
            reason=reason,
            sites=tuple(choice.name for choice in members),
            schemes=tuple(dict.fromkeys(choice.scheme for choice in members)),
        )
        for reason, members in sites.items()
    )


def _raise_if_refused(findings: Findings, num_sites: int) -> None:
    if not findings.refused:
        return
    concerned = dict.fromkeys(name for item in findings.refused for name in item.sites)
    lines = [
        f"  {item.reason}: {spell_sites(item.sites)}" if item.sites else f"  {item.reason}" for item in findings.refused
    ]
    what = f"{len(concerned)} of {num_sites} sites of the plan" if concerned else "this plan"
    under = "" if findings.engine is None else f" for {findings.engine} ({findings.engine_reason})"
    raise ExportError(
        f"'{findings.to}' cannot express {what}{under}; nothing was written. Plan again with --engine "
        f"{findings.engine or '…'} or export to another target:\n" + "\n".join(lines)
    )
