"""The one folder scanner behind every plug-in folder.

A folder is the registry: each public module in it defines one constant (``FORMATS``, ``SCHEMES``, …), a tuple of named
records. Adding a thing is adding one file. Nothing registers itself at import, no list is kept by hand, and a name
that two files claim is an error that names both. What users bring along (``--format-file``) is added by an explicit
call, under the same rules.

    FORMATS = Catalog(kind="format", package="bitwright.formats.definitions", attribute="FORMATS", record_type=Format)
    FORMATS["fp8_e4m3"]        # UnknownName: unknown format 'fp8e4m3'; did you mean 'fp8_e4m3'? Known: …

Devices and engines are data files; `FileCatalog` is the same for a folder of those, with aliases.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from bitwright.errors import BitwrightError, UnknownName


class Named(Protocol):
    """What a catalog holds: anything with a name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


def nearest_name_hint(name: str, known: list[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or ``""``."""
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else "."


@dataclass(frozen=True, kw_only=True)
class Catalog(Mapping[str, T], Generic[T]):
    """All records of one kind, read from the modules of one package when first asked for."""

    #: What one record is called in messages ("format", "scheme").
    kind: str
    #: Dotted name of the package whose modules are scanned.
    package: str
    #: The constant every module of the package must define: a tuple of records.
    attribute: str
    #: The class (or classes) every record must be an instance of.
    record_type: type | tuple[type, ...]
    #: What makes a record of a name that spells it out, or None of any other; such records are not listed.
    spelled: Callable[[str], T | None] = lambda name: None
    _records: dict[str, T] = field(default_factory=dict, repr=False, compare=False)
    _origins: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def _scan(self) -> dict[str, T]:
        if self._records:
            return self._records
        found: dict[str, T] = {}
        origin: dict[str, str] = {}
        package = importlib.import_module(self.package)
        for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
            if info.name.startswith("_"):
                continue
            module = importlib.import_module(f"{self.package}.{info.name}")
            records: tuple[T, ...] | None = getattr(module, self.attribute, None)
            if not isinstance(records, tuple) or not records:
                raise TypeError(f"{module.__name__} must define {self.attribute}, a non-empty tuple of {self.kind}s")
            for record in records:
                if not isinstance(record, self.record_type):
                    raise TypeError(f"{module.__name__}.{self.attribute} holds {record!r}, which is no {self.kind}")
                if record.name in found:
                    raise TypeError(
                        f"{self.kind} '{record.name}' is defined twice: in {origin[record.name]} and {module.__name__}"
                    )
                found[record.name] = record
                origin[record.name] = module.__name__
        self._records.update(found)
        self._origins.update(origin)
        return self._records

    def add(self, record: T, origin: str) -> None:
        """Take a record that lies outside the package, for as long as this process runs.

        Args:
            record: of one of the classes of `record_type`.
            origin: where it comes from, for the message about a second one of its name.

        Raises:
            BitwrightError: the name is taken; both origins are named.
            TypeError: the record is of another class.
        """
        if not isinstance(record, self.record_type):
            raise TypeError(f"{origin} holds {record!r}, which is no {self.kind}")
        if record.name in self._scan():
            raise BitwrightError(
                f"{self.kind} '{record.name}' is defined twice: in {self._origins[record.name]} and {origin}; "
                "rename one of them"
            )
        self._records[record.name] = record
        self._origins[record.name] = origin

    def __getitem__(self, name: str) -> T:
        records = self._scan()
        if name not in records:
            spelled = self.spelled(name)
            if spelled is not None:
                return spelled
            known = sorted(records)
            raise UnknownName(
                f"unknown {self.kind} {name!r}{nearest_name_hint(name, known)} Known {self.kind}s: {', '.join(known)}"
            )
        return records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scan())

    def __len__(self) -> int:
        return len(self._scan())

    def __contains__(self, name: object) -> bool:
        return name in self._scan() or (isinstance(name, str) and self.spelled(name) is not None)


@dataclass(frozen=True, kw_only=True)
class FileCatalog(Generic[T]):
    """All records of one kind, one TOML file each, read from a folder when first asked for."""

    #: What one record is called in messages ("device", "engine").
    kind: str
    #: Dotted name of the package that has the folder.
    package: str
    folder: str
    #: (bytes of a file, its name) → the record.
    read: Callable[[bytes, str], T]
    #: What a user may call a record beside its name, in lower case.
    aliases: Callable[[T], tuple[str, ...]]
    #: Further names that no two records may share.
    claims: Callable[[T], tuple[str, ...]] = lambda record: ()
    #: What is raised where two files claim one name.
    error: type[BitwrightError]

    @cached_property
    def records(self) -> Mapping[str, T]:
        """Name → record, in the order of the files. Two files that claim one name are an error naming both."""
        found: dict[str, T] = {}
        claimed: dict[str, str] = {}
        for entry in sorted((resources.files(self.package) / self.folder).iterdir(), key=lambda item: item.name):
            if not entry.name.endswith(".toml"):
                continue
            record = self.read(entry.read_bytes(), entry.name)
            for claim in (record.name, *self.aliases(record), *self.claims(record)):
                if claim in claimed:
                    raise self.error(
                        f"{self.kind} name '{claim}' is claimed twice: in {claimed[claim]} and {entry.name}"
                    )
                claimed[claim] = entry.name
            found[record.name] = record
        return MappingProxyType(found)

    @property
    def names(self) -> tuple[str, ...]:
        """Every canonical name, sorted."""
        return tuple(sorted(self.records))

    def get(self, name: str) -> T:
        """Return a record by its name or an alias; case does not matter.

        Raises:
            UnknownName: no record has that name; the nearest one is suggested.
        """
        written = name.strip().lower()
        by_alias = {alias: record for record in self.records.values() for alias in self.aliases(record)}
        found = self.records.get(written) or by_alias.get(written)
        if found is not None:
            return found
        hint = nearest_name_hint(written, [*self.records, *by_alias])
        raise UnknownName(f"unknown {self.kind} {name!r}{hint} Known {self.kind}s: {', '.join(self.names)}")
