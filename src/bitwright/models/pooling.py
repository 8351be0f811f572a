"""One vector for a text: how an encoder's vectors of its tokens become one.

Sentence encoders say it beside their weights, in the layout of sentence-transformers: `modules.json` lists the steps
after the encoder, and the folder of the step "Pooling" has a `config.json`. Read here, never imported:

    mean    the mean over the tokens that are no padding      cls     the first token
    max     the largest over them, column by column           last    the last of them

Normalising to unit length is no fact to read: what is compared is directions, so it is always done. A model that says
nothing takes the mean, and a note says so. Refused by name: several vectors side by side, weighted means, and further
steps with weights of their own (Dense), which would have to be chosen for as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bitwright.errors import ModelError

Mode = Literal["mean", "cls", "max", "last"]

#: Key of the pooling's config.json → mode.
_MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
#: Steps of modules.json that need nothing of us: the encoder itself, its pooling, unit length.
_KNOWN_STEPS = ("Transformer", "Pooling", "Normalize")

MEAN_NOTE = "the model does not say how the vectors of its tokens become one: their mean is taken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """How the vectors of a text's tokens become one."""

    mode: Mode

    def pool(self, hidden_SLH: Tensor, real_SL: Tensor) -> Tensor:
        """Return [sequences, hidden] from [sequences, length, hidden] and which tokens are no padding (bool).

        Padding stands at the right; every sequence has at least one token.
        """
        if self.mode == "cls":
            return hidden_SLH[:, 0]
        if self.mode == "last":
            rows = torch.arange(hidden_SLH.shape[0], device=hidden_SLH.device)
            return hidden_SLH[rows, real_SL.sum(1) - 1]
        real_SL1 = real_SL.unsqueeze(-1)
        if self.mode == "max":
            return hidden_SLH.masked_fill(~real_SL1, -torch.inf).amax(1)
        # where, not a product: padding may hold anything, and 0 · Inf is NaN
        total_SH = torch.where(real_SL1, hidden_SLH, 0.0).sum(1)
        return total_SH / real_SL1.sum(1)


def read_pooling(folder: Path) -> Pooling | None:
    """The pooling that a folder's `modules.json` names; None where there is none.

    Raises:
        ModelError: a file that is no JSON, or a step or pooling that is not known; named.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    found = None
    try:
        steps = [(str(step["type"]).rpartition(".")[2], str(step["path"])) for step in _read_json(path)]
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path} is no list of steps with type and path; download the whole folder again") from error
    for kind, below in steps:
        if kind not in _KNOWN_STEPS:
            raise ModelError(
                f"{path} puts a step {kind!r} behind the encoder, and only {', '.join(_KNOWN_STEPS)} are known; pass "
                "a model without it"
            )
        if kind == "Pooling":
            found = _read_mode(folder / below / "config.json")
    return found


def _read_mode(path: Path) -> Pooling:
    config = _read_json(path)
    entries = config.items() if isinstance(config, dict) else ()
    wanted = [key for key, value in entries if str(key).startswith("pooling_mode_") and value is True]
    if len(wanted) != 1 or wanted[0] not in _MODES:
        raise ModelError(
            f"{path} asks for {' and '.join(wanted) or 'no pooling'}, but must for one of {', '.join(_MODES)}; pass a "
            "model that does"
        )
    return Pooling(mode=_MODES[wanted[0]])


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} is missing or no valid JSON ({error}); download the whole folder again") from error
