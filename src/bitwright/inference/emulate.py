"""The exact numerics of a choice, on any device: weights hold the values that codes stand for, inputs are rounded too.

For the time of a `with` block every chosen site's weight is replaced by its dequantised values in fp32, and the inputs
of sites whose scheme rounds activations pass through `fake_quantize` first. Products accumulate in fp32. Afterwards the
model is what it was, bit for bit, also when the block raises.

    with emulate(model, sites, {site.name: SiteRule(quantize_weight=…)}):
        logits = model(input_ids).logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitwright.errors import SchemeError
from bitwright.models.linear_calls import LinearCalls, Matrix, matrices_of
from bitwright.models.sites import Site
from bitwright.quantize.quantize import fake_quantize
from bitwright.quantize.scheme import TensorScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRule:
    """What one site runs with."""

    #: The loaded weight, fp32 [out, in] → the values that it runs with, fp32 of the same shape.
    quantize_weight: Callable[[Tensor], Tensor]
    #: What the site's input is rounded to on every call; None leaves it alone.
    activations: TensorScheme | None = None


@contextmanager
def emulate(model: nn.Module, sites: Sequence[Site], rules: Mapping[str, SiteRule]) -> Iterator[nn.Module]:
    """Run `model` with other weights and rounded inputs at some sites.

    Args:
        model: fp32 model; changed inside the block only.
        sites: all sites of the model.
        rules: site name → what it runs with; sites without an entry keep what they have.

    Raises:
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
    """
    unknown = set(rules) - {site.name for site in sites}
    assert not unknown, f"no such sites: {sorted(unknown)[:3]}"
    changed = [matrix for matrix in matrices_of(sites) if any(site.name in rules for site in matrix.sites)]
    activations = {matrix.name: _activations(matrix, rules) for matrix in changed}
    originals: dict[str, Tensor] = {}
    try:
        for matrix in changed:
            parameter = model.get_parameter(matrix.parameter)
            if matrix.parameter not in originals:
                originals[matrix.parameter] = parameter.data
                parameter.data = parameter.data.clone()
            _write_rows(parameter.data if matrix.expert is None else parameter.data[matrix.expert], matrix, rules)
        rounding_sites = [site for matrix in changed if activations[matrix.name] is not None for site in matrix.sites]
        if not rounding_sites:
            yield model
            return

        def handle(matrix: Matrix, x: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
            scheme = activations[matrix.name]
            return operation(x if scheme is None or not x.is_floating_point() else fake_quantize(x, scheme))

        with LinearCalls(model, rounding_sites, handle):
            yield model
    finally:
        for name, original in originals.items():
            model.get_parameter(name).data = original


@torch.no_grad()
def _write_rows(stored: Tensor, matrix: Matrix, rules: Mapping[str, SiteRule]) -> None:
    matrix_NK = stored.T if matrix.transposed else stored
    for site in matrix.sites:
        if site.name in rules:
            first, last = site.rows or (0, matrix_NK.shape[0])
            rows_NK = matrix_NK[first:last]
            rows_NK.copy_(rules[site.name].quantize_weight(rows_NK.contiguous()))


def _activations(matrix: Matrix, rules: Mapping[str, SiteRule]) -> TensorScheme | None:
    wanted = {rules[site.name].activations if site.name in rules else None for site in matrix.sites}
    if len(wanted) > 1:
        raise SchemeError(
            f"the sites of {matrix.name} share one input but round it differently ({', '.join(map(str, wanted))}); "
            "give all rows of a fused matrix one scheme"
        )
    return wanted.pop()
