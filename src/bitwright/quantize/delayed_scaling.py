"""Scales found from an amax that is known beforehand: FP8 training as Transformer Engine and MS-AMP do it.

A tensor of a training step is read once if its scale is known before it is read. *Delayed scaling* takes the scale from
the amax of earlier steps; *current scaling* pays a second read and takes this tensor's own. Libraries hold the inverse
of what bitwright calls scale: code = x · inv_scale, value = code · scale, scale = 1 / inv_scale. All of it is fp32.

    delayed   amax = max over the history, or its slot 0 ("most_recent")
              inv_scale = (max / amax) / 2^margin, no power of two; the old one where amax is 0, Inf or NaN; the
              largest fp32 number where the quotient is Inf. Then the history rolls by −1 and its slot 0 is zeroed.
    current   inv_scale = max / amax, amax at least epsilon; 1 where amax is 0, Inf or NaN; the largest fp32 number
              where the quotient is Inf; optionally floored to a power of two.
    MS-AMP    inv_scale = 2^(floor(log2(max / amax)) − margin); the old one where amax is 0, Inf or NaN.

max is the format's largest value. Values beyond it saturate (the history lags behind growing values), Inf too; NaN
stays NaN. Quotients are divided once, as in TE's kernels (its Python twin, run eagerly, multiplies by a reciprocal,
which is off by one unit in the last place for a quarter of all amaxes). A NaN in the history holds the scale until it
has left the history: `max` hands NaN on, as torch's does.

Source: Transformer Engine, `_default_sf_compute` and `_amax_and_scale_update` of fp8.py (delayed) and
`compute_scale_from_amax` of recipe_common.cuh (current); MS-AMP, `ScalingMeta.compute_scaling_factor`; FP8-LM,
arXiv:2310.18313, section 2. Rejected: one state per tensor. A model has hundreds, and one history [length, tensors]
makes their update, and the exchange of amaxes between ranks, a single operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.scaling import exact_power_of_two, floor_log2, quotient
from bitwright.quantize.select import select_delayed

AmaxChoice = Literal["max", "most_recent"]
_LARGEST_FP32 = torch.finfo(torch.float32).max


class DelayedScaling:
    """Histories and scales of several tensors that share a format.

    Each step: `record` (or `fake_quantize`, which records) every tensor, as often as it occurs, then `update` once.

    Args:
        format_name: format of the codes, fp8_e4m3 for instance.
        num_tensors: how many tensors have a history and a scale here.
        history_length: steps that the history remembers.
        amax_choice: "max" over the history, or "most_recent" alone.
        margin: binary orders of magnitude kept free above amax.
        reduce_amax: called once per update with this step's amaxes, fp32 [num_tensors]; returns their maximum over all
            ranks. None: this process is alone.
        device: where history and scales are kept.

    Raises:
        SchemeError: a length or a number of tensors below one, or an unknown choice.
    """

    def __init__(
        self,
        format_name: str,
        num_tensors: int = 1,
        *,
        history_length: int = 1024,
        amax_choice: AmaxChoice = "max",
        margin: int = 0,
        reduce_amax: Callable[[Tensor], Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_tensors < 1 or history_length < 1:
            raise SchemeError(
                f"delayed scaling of {num_tensors} tensors over {history_length} steps; give at least one of each"
            )
        if amax_choice not in ("max", "most_recent"):
            raise SchemeError(f"amax_choice is {amax_choice!r}; use 'max' or 'most_recent'")
        self.number = formats.FORMATS[format_name]
        self.amax_choice = amax_choice
        self.margin = margin
        self.reduce_amax = reduce_amax
        #: fp32 [history_length, num_tensors]; slot 0 is the step in progress. Written in place, like inv_scale.
        self.history = torch.zeros(history_length, num_tensors, device=device)
        #: fp32 [num_tensors]: code = x · inv_scale.
        self.inv_scale = torch.ones(num_tensors, device=device)

    @property
    def scale(self) -> Tensor:
        """Fp32 [num_tensors]: value = code · scale."""
        return 1 / self.inv_scale

    def record(self, amax: Tensor, index: int | slice = slice(None)) -> None:
        """Raise this step's amax of one tensor (0-d) or of several ([n]); NaN is kept."""
        self.history[0, index] = torch.maximum(self.history[0, index], amax.detach())

    def fake_quantize(self, x: Tensor, index: int = 0) -> Tensor:
        """Values of `x` under the scale that is known now, and its amax recorded for the next ones, from one read.

        Args:
            x: fp32, bf16 or fp16, any shape; values come back in its dtype.
            index: which of the tensors `x` is.
        """
        backend = select_delayed(self.number.name, x.device.type, x.dtype).module
        values, amax = backend.scale_with_amax(x, self.number, self.inv_scale[index])
        self.record(amax, index)
        return values

    def update(self) -> None:
        """End a step: exchange amaxes, set the scales, move the history up."""
        if self.reduce_amax is not None:
            self.history[0] = self.reduce_amax(self.history[0].clone())
        amax = self.history.amax(dim=0) if self.amax_choice == "max" else self.history[0]
        found = quotient(float(self.number.max), amax) / 2.0**self.margin
        found = torch.where((amax > 0) & torch.isfinite(amax), found, self.inv_scale)
        self.inv_scale.copy_(torch.where(torch.isinf(found), _LARGEST_FP32, found))
        self.history.copy_(torch.roll(self.history, -1, dims=0))
        self.history[0] = 0.0

    def restart_step(self) -> None:
        """Forget the amaxes of a step that is given up."""
        self.history[0] = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs: history and inverse scales, as copies."""
        return {"history": self.history.clone(), "inv_scale": self.inv_scale.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off.

        Raises:
            SchemeError: a part is missing, or its shape is not that of this object.
        """
        for name in ("history", "inv_scale"):
            here, there = getattr(self, name), state.get(name)
            if not isinstance(there, Tensor) or there.shape != here.shape:
                found = list(there.shape) if isinstance(there, Tensor) else "nothing"
                raise SchemeError(
                    f"the state's {name} is {found}, not {list(here.shape)}; build DelayedScaling with the "
                    "history_length and num_tensors that it was saved with"
                )
        self.history.copy_(state["history"])
        self.inv_scale.copy_(state["inv_scale"])


def current_inv_scale(amax: Tensor, format_name: str, *, epsilon: float = 0.0, is_power_of_two: bool = False) -> Tensor:
    """Transformer Engine's current scaling: inverse scales fp32 for fp32 `amax` of any shape.

    Args:
        amax: largest magnitudes of the tensors to be quantised.
        format_name: format of the codes.
        epsilon: least amax that is divided by.
        is_power_of_two: clear the quotient's fraction bits, so that scaling is exact.
    """
    floored = torch.where(amax < epsilon, epsilon, amax)
    inv_scale = quotient(float(formats.FORMATS[format_name].max), floored).clamp(max=_LARGEST_FP32)
    if is_power_of_two:
        inv_scale = exact_power_of_two(floor_log2(inv_scale))
    return torch.where((floored > 0) & torch.isfinite(floored), inv_scale, 1.0)


def power_of_two_inv_scale(amax: Tensor, old_inv_scale: Tensor, format_name: str, *, margin: int = 0) -> Tensor:
    """MS-AMP's scaling: inverse scales fp32 for fp32 `amax` of any shape; `old_inv_scale` where amax says nothing.

    The exponent is held within −126 to 127, where the scale and its inverse are both fp32 numbers of full precision.
    """
    exponent = floor_log2(quotient(float(formats.FORMATS[format_name].max), amax).clamp(max=_LARGEST_FP32)) - margin
    inv_scale = exact_power_of_two(exponent.clamp(-126, 127))
    return torch.where((amax > 0) & torch.isfinite(amax), inv_scale, old_inv_scale)
