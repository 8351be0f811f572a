"""The tensors of a checkpoint with codes: what stays as it was, the parts of every coded module, and whatever else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from bitwright.export.folding import fold_factors
from bitwright.export.modules import CodedModule
from bitwright.export.source import ExportSource
from bitwright.export.written_folder import ShardWriter, as_stored


def write_coded_shards(
    source: ExportSource,
    folder: Path,
    modules: Iterable[CodedModule],
    parts_of: Callable[[CodedModule], Mapping[str, Tensor]],
    further: Mapping[str, Tensor],
) -> None:
    """Write all tensors of a checkpoint, with column factors folded into norms.

    Args:
        source: the plan on its model.
        folder: where the shards go.
        modules: those with codes.
        parts_of: a module's tensors, by the end of their names.
        further: whole name → tensor, after all others.
    """
    with ShardWriter(folder) as shards:
        for name, tensor in source.rest(fold_factors(source).parameters):
            for stored, value in as_stored(source.model, name, tensor).items():
                shards.add(stored, value)
        for module in modules:
            for part, tensor in parts_of(module).items():
                shards.add(f"{module.stored}.{part}", _as_it_lies(module, part, tensor))
        for name, tensor in further.items():
            shards.add(name, tensor)


def _as_it_lies(module: CodedModule, part: str, tensor: Tensor) -> Tensor:
    """A weight that is stored [in, out] keeps lying so: engines turn what is called "weight", and nothing else."""
    return tensor.T if module.is_in_out and part == "weight" else tensor
