"""A model in memory: fp32 weights, tokenizer, where they came from, and a hash that names them.

The hash is SHA-256 over every parameter in order of name: its name, its shape, the bytes of its fp32 values. Tied
parameters count once. Two checkpoints with the same values have the same hash, in whatever files they lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.grid import detect_grid
from bitwright.models.pooling import MEAN_NOTE, Pooling
from bitwright.models.sites import find_sites


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A causal language model, ready to be measured: eval mode, fp32, no gradients, on the CPU."""

    #: The transformers model.
    model: nn.Module
    #: Its tokenizer.
    tokenizer: Any
    #: Folder name, hub id, file stem, or "demo".
    name: str
    #: SHA-256 over names, shapes and fp32 bytes of the parameters.
    hash: str
    #: Number of parameters, tied ones once.
    num_parameters: int
    #: Parameter → format in the checkpoint: "bf16", "q4_1", ….
    loaded_format: Mapping[str, str]
    #: Parameter → stored bits per weight, scales included (q4_1: 5.0).
    loaded_bits: Mapping[str, float]
    #: What a user should know about the weights.
    notes: tuple[str, ...]
    #: How an encoder's vectors of its tokens become one; None for a model with an output head.
    pooling: Pooling | None = None

    @property
    def num_positions(self) -> int | None:
        """The most tokens that the model takes at once; None where its config does not say.

        Some encoders count positions from behind those that they keep for padding: their tokenizer then knows.
        """
        found: int | None = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        if found is None or self.pooling is None:
            return found
        return min(found, getattr(self.tokenizer, "model_max_length", found))


def from_memory(
    model: nn.Module,
    tokenizer: Any,
    *,
    name: str,
    loaded_format: Mapping[str, str] | None = None,
    loaded_bits: Mapping[str, float] | None = None,
    notes: tuple[str, ...] = (),
    pooling: Pooling | None = None,
    site_file: Path | str | None = None,
) -> LoadedModel:
    """Wrap a model that is in memory already; its weights are checked, hashed, and searched for an existing grid.

    The model becomes fp32, eval, without gradients, in place. Without ``loaded_format`` the present dtypes count as
    the loaded ones. ``site_file`` names the sites where `find_sites` cannot. A model without an output head is an
    encoder; without ``pooling`` it takes the mean of its tokens. Raises ModelError for NaN or Inf weights (named) and
    for a model without linear layers.
    """
    present = {parameter: DTYPE_FORMATS.get(p.dtype, str(p.dtype)) for parameter, p in model.named_parameters()}
    present_bits = {parameter: 8.0 * p.dtype.itemsize for parameter, p in model.named_parameters()}
    model.float().eval().requires_grad_(False)
    raise_if_not_finite(model, name)
    grid = detect_grid(model, find_sites(model, site_file))
    if pooling is None and not has_head(model):
        pooling, notes = Pooling(mode="mean"), (*notes, MEAN_NOTE)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        hash=hash_weights(model),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        loaded_format=present if loaded_format is None else loaded_format,
        loaded_bits=present_bits if loaded_bits is None else loaded_bits,
        notes=notes if grid is None else (*notes, grid.describe()),
        pooling=pooling,
    )


def has_head(model: nn.Module) -> bool:
    """Does the model predict tokens: does it declare a linear output head, or that it has logits by other means?"""
    declared = getattr(model, "get_output_embeddings", None)
    by_other_means = bool(getattr(model, "puts_out_logits", False))
    return by_other_means or (declared is not None and isinstance(declared(), nn.Linear))


#: torch dtype → canonical format name.
DTYPE_FORMATS: dict[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


def hash_weights(model: nn.Module) -> str:
    """Hex SHA-256 over names, shapes and fp32 bytes of all parameters, in order of name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().contiguous().numpy().reshape(-1).view("u1").data)
    return digest.hexdigest()


def hash_each_weight(model: nn.Module) -> dict[str, str]:
    """Parameter → the first 16 hex digits of SHA-256 over its shape and fp32 bytes: enough to tell two apart."""
    return {name: _hash_weight(parameter) for name, parameter in sorted(model.named_parameters())}


def _hash_weight(parameter: Tensor) -> str:
    digest = hashlib.sha256(f"{list(parameter.shape)}\n".encode())
    digest.update(parameter.detach().float().contiguous().numpy().reshape(-1).view("u1").data)
    return digest.hexdigest()[:16]


def raise_if_not_finite(model: nn.Module, name: str) -> None:
    """Raise ModelError naming the first parameter with NaN or Inf, their number, and how many parameters have some."""
    bad: list[tuple[str, int, int]] = []
    for parameter_name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            total = values.sum()  # one quick pass: NaN and Inf reach the sum; a sum may also overflow by itself
        num_bad = 0 if np.isfinite(total) else int((~np.isfinite(values)).sum())
        if num_bad:
            bad.append((parameter_name, num_bad, parameter.numel()))
    if bad:
        first, num_bad, num_all = bad[0]
        others = f" (and {len(bad) - 1} more parameters have some)" if len(bad) > 1 else ""
        raise ModelError(
            f"model {name!r}: parameter {first!r} has {num_bad} NaN or Inf among its {num_all} values{others}; "
            "weights must be finite, so get an undamaged checkpoint"
        )
