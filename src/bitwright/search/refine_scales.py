"""Scales tuned on the KL itself, with codes held: a few steps of Adam through the whole model.

Codes are found from second-order predictions, each matrix on its own. Their scales are few (one for a group of
weights), continuous, and move the true KL(reference ‖ plan) of the calibration text, errors of all sites together, so
that gradients can be followed: for a scale s of a group

    ∂KL/∂ log s = Σ over the group of  ∂KL/∂W · W̃            W̃ = code · s, the weight that runs

Adam (Kingma & Ba, arXiv:1412.6980) makes the same relative step for every scale, whatever its size; steps fall linearly
to zero. Few numbers and few steps leave little room to learn the calibration text by heart.

Gradients of a parameter are reduced to those of its scales as soon as they are complete, and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright import formats
from bitwright.models.sites import Site, site_weight
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scaling import round_stored
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.seen import product_dtype
from bitwright.search.compare import batches
from bitwright.search.output import Output, Reference
from bitwright.search.progress import Stage

#: Times that the text is read.
NUM_EPOCHS = 4
#: Tokens whose gradients make one step.
STEP_TOKENS = 1024
#: The first step, in relative change of a scale.
FIRST_STEP = 1e-3
_DECAYS = (0.9, 0.95)


def scales_are_continuous(scheme: TensorScheme) -> bool:
    """Whether values are code · scale, with scales of a float format that is fine enough to be tuned."""
    scaling = scheme.scaling
    return (
        scaling is not None
        and scaling.symmetry == "symmetric"
        and not scaling.tensor_scale
        and scaling.granularity.scope in ("row", "group")
        and formats.FORMATS[scaling.scale_format].bits >= 16
    )


@dataclass(kw_only=True, eq=False)
class _Tuned:
    """The scales of one site, and what Adam knows of them; all fp32 [N, G]."""

    site: Site
    q: QTensor
    gradient: Tensor
    log_change: Tensor
    mean: Tensor
    square: Tensor

    @staticmethod
    def of(site: Site, q: QTensor) -> _Tuned:
        assert q.scales_NG is not None
        zeros = torch.zeros_like(q.scales_NG)
        return _Tuned(
            site=site,
            q=q,
            gradient=zeros.clone(),
            log_change=zeros.clone(),
            mean=zeros.clone(),
            square=zeros.clone(),
        )

    def collect(self, gradient_NK: Tensor, weight_NK: Tensor) -> None:
        """Add the share of one backward pass."""
        scaling = self.q.scheme.scaling
        assert scaling is not None
        rows, columns = weight_NK.shape
        width = scaling.granularity.group_columns(columns)
        products_NK = F.pad(gradient_NK * weight_NK, (0, -columns % width))
        self.gradient += products_NK.reshape(rows, -1, width).sum(-1)

    def step(self, size: float, number: int) -> None:
        """One step of Adam; `number` counts from 1."""
        first, second = _DECAYS
        self.mean.lerp_(self.gradient, 1 - first)
        self.square.lerp_(self.gradient.square(), 1 - second)
        mean, square = self.mean / (1 - first**number), self.square / (1 - second**number)
        self.log_change -= size * mean / (square.sqrt() + 1e-30)
        self.gradient.zero_()

    def result(self) -> QTensor:
        """The codes with the scales as they are now, rounded to their format."""
        scaling = self.q.scheme.scaling
        assert scaling is not None and self.q.scales_NG is not None
        scale = round_stored(self.q.scales_NG * self.log_change.exp(), scaling.scale_format)
        return replace(self.q, scales_NG=scale)

    def write(self, weight_NK: Tensor) -> None:
        """Let the model run with the scales as they are now."""
        weight_NK.copy_(self.result().dequantize())


def tune_scales(
    model: nn.Module,
    sites: Sequence[Site],
    codes: Mapping[str, QTensor],
    reference: Reference,
    output: Output,
    stage: Stage,
    *,
    seed: int,
) -> dict[str, QTensor]:
    """Codes with other scales.

    Args:
        model: every site as the plan has it, those of `codes` included; its weights are changed.
        sites: all sites.
        codes: what is tuned, by site; each scheme with `scales_are_continuous`.
        reference: the loaded weights on the calibration text.
        output: what is compared.
        stage: advanced by one per sequence.
        seed: of the order in which the text is read.
    """
    tuned = [_Tuned.of(site, codes[site.name]) for site in sites if site.name in codes]
    rows = list(batches(reference.text))
    per_step = max(1, STEP_TOKENS // max(1, reference.text.input_ids[rows[0]].numel()))
    num_steps = NUM_EPOCHS * -(-len(rows) // per_step)
    generator = torch.Generator().manual_seed(seed)
    number = 0
    with ExitStack() as stack:
        _collect_gradients(model, tuned, stack)
        for _ in range(NUM_EPOCHS):
            order = torch.randperm(len(rows), generator=generator).tolist()
            for start in range(0, len(order), per_step):
                for index in order[start : start + per_step]:
                    _run(model, reference, rows[index], output)
                    stage.advance(rows[index].stop - rows[index].start)
                number += 1
                _take_step(model, tuned, FIRST_STEP * (1 - (number - 1) / num_steps), number)
    return {one.site.name: one.result() for one in tuned}


def _run(model: nn.Module, reference: Reference, rows: slice, output: Output) -> None:
    dtype = product_dtype()
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        output.divergence(reference, model, rows).backward()


@torch.no_grad()
def _take_step(model: nn.Module, tuned: Sequence[_Tuned], size: float, number: int) -> None:
    for one in tuned:
        one.step(size, number)
        one.write(site_weight(model, one.site))


def _collect_gradients(model: nn.Module, tuned: Sequence[_Tuned], stack: ExitStack) -> None:
    """Let gradients of parameters flow, into their scales, for as long as the stack is open."""
    by_parameter: dict[str, list[_Tuned]] = {}
    for one in tuned:
        by_parameter.setdefault(one.site.parameter, []).append(one)
    for name, members in by_parameter.items():
        parameter = model.get_parameter(name)
        parameter.requires_grad_(True)
        stack.callback(parameter.requires_grad_, False)
        stack.callback(parameter.register_post_accumulate_grad_hook(_reducer(members)).remove)


def _reducer(members: Sequence[_Tuned]) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        for one in members:
            one.collect(_rows_of(parameter.grad, one.site), _rows_of(parameter.detach(), one.site))
        parameter.grad = None

    return reduce


def _rows_of(stored: Tensor, site: Site) -> Tensor:
    """A site's part of what has the shape of its parameter, [N, K]."""
    matrix = stored if site.expert is None else stored[site.expert]
    matrix_NK = matrix.T if site.transposed else matrix
    return matrix_NK if site.rows is None else matrix_NK[slice(*site.rows)]
