"""What reads one kind of checkpoint: which it claims, and what its tensors say in the terms of this program.

One file of `sources/` defines SOURCES, a tuple of final classes with these members. A source says what is stored and
judges nothing: whether it fits the reference is the importer's question (`importer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from bitwright.catalog import Catalog
from bitwright.export.checkpoint import Checkpoint
from bitwright.export.stored_matrix import StoredMatrix
from bitwright.models.loaded import LoadedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """What a checkpoint holds, tensor by tensor; nothing is read before it is asked for."""

    #: Module → its matrix under scales. Reading one may raise ModelError, a sentence that goes on from its name.
    coded: Mapping[str, Callable[[], StoredMatrix]]
    #: Parameter → its plain numbers.
    plain: Mapping[str, Callable[[], Tensor]]
    #: What a reader of the plan must know.
    notes: tuple[str, ...] = field(default=())


@runtime_checkable
class Source(Protocol):
    """What every kind of checkpoint has."""

    @property
    def name(self) -> str:
        """As the kind calls itself."""

    @property
    def description(self) -> str:
        """One line for tables: what writes such checkpoints, and which layouts are read."""

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint is of this kind."""

    def contents(self, checkpoint: Checkpoint, reference: LoadedModel) -> Contents:
        """What it holds, under the reference's names.

        Raises:
            ModelError: a layout of this kind that is not read.
        """


#: Every kind, by name.
SOURCES: Catalog[Source] = Catalog(
    kind="source", package="bitwright.export.sources", attribute="SOURCES", record_type=Source
)


def plain_tensors(checkpoint: Checkpoint, reference: LoadedModel) -> dict[str, Callable[[], Tensor]]:
    """Tensors that have the name of one of the reference's parameters, or might be one under another name."""
    names = {name for name, _ in reference.model.named_parameters()}
    return {
        name: _reader(checkpoint, name)
        for name in checkpoint.tensors
        if name in names or name.endswith((".weight", ".bias"))
    }


def _reader(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    return lambda: checkpoint.read(name)
