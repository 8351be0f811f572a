"""The model at the end of a run, as a folder that transformers (or, of adapters, peft) loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.models.quiet import quiet_transformers
from bitwright.plan.whole_folder import assembled_folder
from bitwright.training.processes.ranks import Ranks, unwrapped


def save_trained_model(model: nn.Module, tokenizer: Any, folder: Path, ranks: Ranks) -> Path:
    """Write model and tokenizer, whole or not at all; all ranks call it, the first writes.

    Args:
        model: as it was trained; pieces of many ranks are put together.
        tokenizer: of transformers; None: none is written.
        folder: replaced where it is there.
        ranks: all that share the model.

    Raises:
        TrainingError: the disk is full, or refuses.
    """
    plain: Any = unwrapped(model)
    weights = {name: _whole(value) for name, value in plain.state_dict().items()}
    target = Path(os.path.realpath(folder))
    failure = None
    if ranks.is_first:
        try:
            with assembled_folder(target) as assembled, quiet_transformers():
                plain.save_pretrained(assembled, state_dict=weights)
                if tokenizer is not None:
                    tokenizer.save_pretrained(assembled)
        except OSError as error:
            failure = f"could not write the model to '{target}': {error.strerror or error}; the last checkpoint stands"
    failure = ranks.gather(failure)[0]
    if failure is not None:
        raise TrainingError(failure)
    return target


def _whole(value: Any) -> Any:
    """A tensor of which every rank has a piece, put together on the CPU."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
