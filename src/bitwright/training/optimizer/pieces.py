"""Parameters cut into flat pieces, and pieces into batches of a bounded size: what an optimizer steps on at a time.

A batch of at most `BATCH_ELEMENTS` elements has fp32 stand-ins for its parameters, gradients and moments, and is stored
before the next one is begun. So the memory that a step takes beside the model does not grow with the model:

    4 (parameter) + 4 (gradient, unless it is fp32) + 4 (each moment, unless it is fp32) + 4 (one of them, rounded)

bytes · BATCH_ELEMENTS, and what the optimizer itself takes for as many elements. For AdamW on bf16 gradients and
moments those are 640 MiB, with fp32 moments 256 MiB. Where a parameter is cut depends on its own length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import TrainingError
from bitwright.training.gradients import local_part

#: Elements that are widened at a time.
BATCH_ELEMENTS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of elements of one parameter."""

    parameter: Tensor
    #: The part of the parameter that this rank holds.
    local: Tensor
    #: Its elements in order, [n]: the same memory, or a copy where that has gaps.
    flat: Tensor
    #: Which parameter group.
    group: int
    #: Which piece of its parameter, and of how many.
    number: int
    num_pieces: int
    first: int
    last: int

    @property
    def shape(self) -> torch.Size:
        """Shape of what this rank holds."""
        return self.local.shape

    @property
    def num_elements(self) -> int:
        """How many."""
        return self.last - self.first

    @property
    def stored(self) -> Tensor:
        """The elements as the parameter stores them, [n]."""
        return self.flat[self.first : self.last]

    @property
    def is_narrow(self) -> bool:
        """Whether the parameter is stored in less than fp32, so that a stand-in is needed."""
        return self.flat.dtype != torch.float32

    @property
    def all_pieces(self) -> list[Piece]:
        """The pieces of its parameter, itself among them."""
        most = self.first // self.number if self.number else self.num_elements
        ends = [min((number + 1) * most, self.flat.numel()) for number in range(self.num_pieces)]
        return [replace(self, number=number, first=number * most, last=end) for number, end in enumerate(ends)]

    def part_of(self, tensor: Tensor) -> Tensor:
        """The same elements of a tensor of the parameter's shape, [n]; a view where it is contiguous."""
        return tensor.reshape(-1)[self.first : self.last]

    def shaped(self, run: Tensor) -> Tensor:
        """A run [n] as the optimizer sees it: flat; a single element in its parameter's shape.

        A scalar's moments could not be told from its step counter otherwise.
        """
        return run if self.flat.numel() > 1 else run.view(self.shape)

    def gradient(self) -> Tensor:
        """The gradient of these elements in fp32, shaped like them."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TrainingError(
                "a gradient is sparse, and parameters are updated as dense ones; build the embedding with sparse=False"
            )
        return self.shaped(self.part_of(local_part(gradient)).float())

    def write_back(self) -> None:
        """Once `stored` is written: bring a copy back to a parameter whose memory has gaps."""
        if self.last == self.flat.numel() and self.flat.data_ptr() != self.local.data_ptr():
            self.local.copy_(self.flat.view(self.shape))


def cut(groups: Sequence[Mapping[str, Any]], batch_elements: int = BATCH_ELEMENTS) -> Iterator[list[Piece]]:
    """Yield batches of pieces of all parameters that have a gradient, in order; those of a batch are on one device.

    Args:
        groups: parameter groups of an optimizer.
        batch_elements: most elements of a batch, and of a piece.
    """
    batch: list[Piece] = []
    room = batch_elements
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            for piece in _pieces_of(parameter, index, batch_elements):
                is_elsewhere = bool(batch) and batch[0].flat.device != piece.flat.device
                if batch and (piece.num_elements > room or is_elsewhere):
                    yield batch
                    batch, room = [], batch_elements
                batch.append(piece)
                room -= piece.num_elements
    if batch:
        yield batch


def _pieces_of(parameter: Tensor, group: int, most: int) -> Iterator[Piece]:
    local = local_part(parameter.detach())
    flat = local.reshape(-1)
    num_elements = flat.numel()
    starts = range(0, num_elements, most)
    for number, first in enumerate(starts):
        last = min(first + most, num_elements)
        yield Piece(parameter, local, flat, group, number, len(starts), first, last)
