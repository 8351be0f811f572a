"""Sites named by hand: `--sites FILE`, for models whose modules no table and no graph can name.

    [[site]]
    module = "blocks.*.mlp.fc1"         # the weight of these modules
    role = "mlp.up"

    [[site]]
    parameter = "blocks.*.attn.wqkv"    # or a parameter itself
    role = "attn.q"
    rows = [0, 64]                      # of the [out, in] matrix
    part = "q"                          # the site's name is then blocks.0.attn.wqkv[q]
    transposed = true                   # stored [in, out]
    tied_group = "{parent}.qkv"         # these sites share a scheme; {parent} is what lies before the last dot

    [[site]]
    module = "blocks.0.**"
    keep = true                         # these stay as they were loaded

The file is the whole list: what it does not name keeps what it has, and a file without a [[site]] names none. Patterns
match a whole dotted name: `*` stays within one component, `**` stands for any number of them. Only matrices, and stacks
of them in a 3-D parameter (one site each), are candidates. A pattern that matches nothing is an error, and so are two
entries that claim the same rows: no order of entries decides in silence.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from bitwright.catalog import nearest_name_hint
from bitwright.errors import ModelError
from bitwright.models.names import EXPERT_PARAMETERS, FUSED_ROWS, LINEAR_ROLES
from bitwright.models.sites import Site, uses_of

#: Every role that a weight can have.
ROLES: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            *(role for _, role in LINEAR_ROLES),
            *(role for _, _, role in EXPERT_PARAMETERS),
            *(role for fusion in FUSED_ROWS.values() for role in fusion.roles),
            "embedding",
            "lm_head",
            "other",
        ]
    )
)


class SiteClaim(BaseModel):
    """One [[site]] of a file: which matrices, and what they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    module: str | None = None
    parameter: str | None = None
    role: str = "other"
    rows: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)] | None = None
    part: str | None = None
    transposed: bool = False
    tied_group: str | None = None
    keep: bool = False

    @model_validator(mode="after")
    def _raise_if_inconsistent(self) -> Self:
        if (self.module is None) == (self.parameter is None):
            raise ValueError("has to name either a module or a parameter")
        if self.role not in ROLES:
            raise ValueError(
                f"has the role {self.role!r}{nearest_name_hint(self.role, list(ROLES))} Roles: {', '.join(ROLES)}"
            )
        if self.rows is not None and self.rows[0] >= self.rows[1]:
            raise ValueError(f"has the rows {self.rows}, which are [first, last) with first < last")
        if self.part is not None and self.rows is None:
            raise ValueError(f"has the part {self.part!r} but no rows that it is")
        if self.keep and self.model_fields_set - {"module", "parameter", "rows", "transposed", "keep"}:
            raise ValueError("has keep = true, so that nothing else can be said of it")
        return self

    @property
    def pattern(self) -> str:
        """The pattern as it stands in the file."""
        return str(self.module if self.module is not None else self.parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A parameter that holds one matrix or a stack of them, under one of its names."""

    module: str
    #: This name of it, and the one in `model.named_parameters()`.
    name: str
    parameter: str
    shape: tuple[int, ...]
    uses: tuple[str, ...]


def read_site_file(path: Path | str) -> tuple[SiteClaim, ...]:
    """The entries of a file.

    Raises:
        ModelError: the file cannot be read or is no TOML, or an entry contradicts itself; says which, and the field.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"the sites file {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"the sites file {path} is no valid TOML ({error}); correct it") from error
    entries = content.pop("site", [])
    if content or not isinstance(entries, list):
        wrong = f"has {next(iter(content))!r}" if content else "has [site]"
        raise ModelError(f"the sites file {path} {wrong}, but knows nothing except [[site]] entries; correct it")
    claims = []
    for number, entry in enumerate(entries, start=1):
        try:
            claims.append(SiteClaim.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            hint = nearest_name_hint(field, list(SiteClaim.model_fields)) if first["type"] == "extra_forbidden" else "."
            what = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
            raise ModelError(
                f"the sites file {path}: entry {number}{f', {field}:' if field else ''} {what}{hint} Correct it"
            ) from error
    return tuple(claims)


def sites_from_file(model: nn.Module, path: Path | str) -> tuple[Site, ...]:
    """The sites of a model that a file names, in the order of the file and of the model's parameters.

    Raises:
        ModelError: as `read_site_file`; or a pattern matches nothing, rows lie outside a matrix, or two entries claim
            the same weights. Both are named.
    """
    return sites_of_claims(model, read_site_file(path))


def sites_of_claims(model: nn.Module, claims: Sequence[SiteClaim]) -> tuple[Site, ...]:
    """The sites that entries name; see `sites_from_file`."""
    candidates = tuple(_candidates(model))
    sites: list[Site] = []
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for number, claim in enumerate(claims, start=1):
        label = f"entry {number} ({claim.pattern!r})"
        matched = [candidate for candidate in candidates if _claims(claim, candidate)]
        if not matched:
            raise ModelError(_nothing_matched(label, claim, candidates))
        for candidate in matched:
            first, last = _rows(claim, candidate, label)
            for other_first, other_last, other in taken.setdefault(candidate.parameter, []):
                if first < other_last and other_first < last:
                    raise ModelError(
                        f"{other} and {label} of the sites file both claim {candidate.name}; let one of them name it"
                    )
            taken[candidate.parameter].append((first, last, label))
            sites += [] if claim.keep else _sites(claim, candidate)
    names = [site.name for site in sites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"two sites of the sites file are called {twice!r}; give their rows different parts")
    return tuple(sites)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is a whole dotted name: `*` within a component, `**` any number of components."""
    return _matches(pattern.split("."), name.split("."))


def _matches(patterns: list[str], parts: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_matches(patterns[1:], parts[start:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _matches(patterns[1:], parts[1:])


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    uses = uses_of(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() in (2, 3):
            yield _Candidate(
                module=name.rpartition(".")[0],
                name=name,
                parameter=canonical[id(parameter)],
                shape=tuple(parameter.shape),
                uses=tuple(uses[id(parameter)]),
            )


def _claims(claim: SiteClaim, candidate: _Candidate) -> bool:
    if claim.parameter is not None:
        return matches(claim.parameter, candidate.name)
    return candidate.name.rpartition(".")[2] == "weight" and matches(str(claim.module), candidate.module)


def _out_in(claim: SiteClaim, candidate: _Candidate) -> tuple[int, int]:
    first, second = candidate.shape[-2:]
    return (second, first) if claim.transposed else (first, second)


def _rows(claim: SiteClaim, candidate: _Candidate, label: str) -> tuple[int, int]:
    num_rows = _out_in(claim, candidate)[0]
    first, last = claim.rows or (0, num_rows)
    if last > num_rows:
        raise ModelError(
            f"{label} of the sites file names the rows [{first}, {last}) of {candidate.name}, which has {num_rows} "
            f"(it is stored as {list(candidate.shape)}); correct the rows, or set transposed"
        )
    return first, last


def _sites(claim: SiteClaim, candidate: _Candidate) -> Iterator[Site]:
    columns = _out_in(claim, candidate)[1]
    first, last = _rows(claim, candidate, "")
    whole = candidate.name.removesuffix(".weight")
    tied = whole if claim.tied_group is None else claim.tied_group.replace("{parent}", whole.rpartition(".")[0])
    for expert in range(candidate.shape[0]) if len(candidate.shape) == 3 else (None,):
        base = whole if expert is None else f"{whole}.{expert}"
        yield Site(
            name=base if claim.rows is None else f"{base}[{claim.part or f'{first}:{last}'}]",
            kind="weight",
            role=claim.role,
            module=candidate.module,
            parameter=candidate.parameter,
            rows=None if claim.rows is None else (first, last),
            expert=expert,
            transposed=claim.transposed,
            tied_group=tied if claim.tied_group is not None else None if claim.rows is None else base,
            shape=(last - first, columns),
            uses=candidate.uses,
        )


def _nothing_matched(label: str, claim: SiteClaim, candidates: Sequence[_Candidate]) -> str:
    kind = "module with a weight matrix" if claim.parameter is None else "parameter that is a matrix"
    names = (
        [candidate.name for candidate in candidates]
        if claim.parameter is not None
        else [candidate.module for candidate in candidates if candidate.name.rpartition(".")[2] == "weight"]
    )
    shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return (
        f"{label} of the sites file matches no {kind}{nearest_name_hint(claim.pattern, names)} There are: "
        f"{shown or 'none'}"
    )
