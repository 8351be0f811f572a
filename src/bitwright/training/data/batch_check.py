"""NaN, Inf and token ids that no embedding has, found before the model sees them.

A NaN in the input makes every gradient NaN: the loss scale falls, steps are skipped, and the run seems to suffer from
its precision. A token id beyond the embedding is an IndexError deep in a kernel, on GPUs one that names no line. Here
the batch and the place in it are named. One pass over integers, one over floating-point inputs.

    for batch in checked_batches(data, vocabulary_size=model.config.vocab_size): …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bitwright.errors import DataError
from bitwright.training.data.token_rows import IGNORED


def checked_batches(
    batches: Iterable[Mapping[str, Any]], *, vocabulary_size: int | None = None, first: int = 0
) -> Iterator[Mapping[str, Any]]:
    """Hand on batches, each checked by `raise_if_unusable`; the first is called number `first`.

    Raises:
        DataError: as `raise_if_unusable` says, or `batches` are no batches.
    """
    if isinstance(batches, Mapping):
        raise DataError("batches is a single batch; give an iterable of them: [batch]")
    if not isinstance(batches, Iterable):
        raise DataError(f"batches is of type {type(batches).__name__}, which cannot be iterated over; give an iterable")
    for number, batch in enumerate(batches, start=first):
        raise_if_unusable(batch, number=number, vocabulary_size=vocabulary_size)
        yield batch


def raise_if_unusable(batch: Mapping[str, Any], *, number: int, vocabulary_size: int | None = None) -> None:
    """Refuse a batch that would spoil a step.

    Args:
        batch: name → tensor, as a model is called with it; what is no tensor is not looked at.
        number: what the message calls it.
        vocabulary_size: `input_ids`, and `labels` where they count, must be below it; None: they are not looked at.

    Raises:
        DataError: the batch is no mapping, a floating-point input has NaN or Inf, or an id is out of range; names the
            batch and the place.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"batch {number} is of type {type(batch).__name__}, but a model is called with a mapping of names to "
            "tensors; give {'input_ids': …, 'labels': …}"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.numel() == 0:
            continue
        if value.is_floating_point():
            if not torch.isfinite(value).all():
                place = _first(~torch.isfinite(value))
                raise DataError(
                    f"batch {number}: '{name}'{list(place)} is {value[place].item()}, and one such number makes every "
                    "gradient of the step NaN; mend the data, or leave this sample out"
                )
        elif vocabulary_size is not None and name in ("input_ids", "labels"):
            wrong = (value < 0) | (value >= vocabulary_size)
            if name == "labels":
                wrong &= value != IGNORED
            if wrong.any():
                place = _first(wrong)
                raise DataError(
                    f"batch {number}: '{name}'{list(place)} is {value[place].item()}, but the model's embedding has "
                    f"the ids 0 to {vocabulary_size - 1}"
                    f"{f' (and {IGNORED} stands for what does not count)' if name == 'labels' else ''}; "
                    "use the tokenizer that belongs to the model"
                )


def _first(wrong: Tensor) -> tuple[int, ...]:
    """Where the first True is."""
    return tuple(int(index) for index in wrong.nonzero()[0])
