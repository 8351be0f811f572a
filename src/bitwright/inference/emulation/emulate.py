"""The exact numerics of a choice, on any device: weights hold the values that codes stand for, inputs are rounded too.

For the time of a `with` block every chosen site's weight is replaced by its dequantised values in fp32, and the inputs
of sites whose scheme rounds activations are rounded first. Products accumulate in fp32. Afterwards the model is what it
was, bit for bit, also when the block raises.

    with emulate(model, sites, {site.name: SiteRule(quantize_weight=…)}):
        logits = model(input_ids).logits

A transform W x = W' x' (`quantize/fitted.py`) is computed as engines do. Where inputs are rounded, W' runs on the
rounded x'; each matrix changes its own input, also where an engine would fold the change into the norm before, which
needs all readers of that norm to agree. Where they are not, the effective weight of the original space runs, and no
input is touched.

Models that nearly fill the memory have two ways, with results that are equal bit for bit. `originals` says where the
replaced weights lie meanwhile: on disk they take no memory, and cost one read (`models/spool.py`). `in_place=False`
keeps no copy of any weight: the values of a matrix are computed anew whenever it is called, which costs more than the
call where few tokens are run at once. Only matrices are reached then that the model computes with in the functions of
`models/linear_calls.py`. Codes are found once a call: a choice should not have to search for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitwright.errors import SchemeError
from bitwright.inference.counters import Counters, Overflows, count_overflows
from bitwright.inference.emulation.values import ValueRule, emulate_values
from bitwright.inference.fallback import Fallback
from bitwright.models.linear_calls import LinearCalls, Matrix, Operation, matrices_of
from bitwright.models.sites import Site
from bitwright.models.spool import InMemory, Originals
from bitwright.models.value_sites import ValueSite
from bitwright.quantize.fitted import UNCHANGED, Fitted
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import overflows, round_input


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SiteRule:
    """What one site runs with."""

    #: The loaded weight, fp32 [out, in] → the values of its codes, fp32 of the same shape: those of the changed weight,
    #: Q(transform.weight(W)), where there is a transform.
    quantize_weight: Callable[[Tensor], Tensor]
    #: What the site's input is rounded to on every call; None leaves it alone.
    activations: TensorScheme | None = None
    #: The exact change of weight and inputs that comes before rounding.
    transform: Fitted = UNCHANGED
    #: fp32 0-d: the one scale that inputs are rounded under; None: found on every call, or none needed.
    input_scale: Tensor | None = None

    def multiply(
        self,
        x: Tensor,
        operation: Operation,
        weight: Tensor | None = None,
        look: Callable[[Tensor], None] | None = None,
        fallback: Fallback | None = None,
    ) -> Tensor:
        """The output of `operation` on x rounded as `activations` says; `look` sees the input before it is rounded.

        Tokens whose inputs overflow are as the fallback says; they saturate without one.
        """
        assert self.activations is not None
        if not x.is_floating_point():  # rows of an embedding, read out of a head's changed weight
            return self.transform.restore(operation(x, weight))
        x = self.transform.input(x)
        if look is not None:
            look(x)
        return operation(self._rounded(x, self.activations, fallback), weight)

    def _rounded(self, x: Tensor, scheme: TensorScheme, fallback: Fallback | None) -> Tensor:
        beyond = None if fallback is None else overflows(x, scheme, self.input_scale)
        if fallback is None or beyond is None:
            return round_input(x, scheme, self.input_scale)
        overflowed = beyond.any(-1, keepdim=True)
        return fallback.rescue(x, beyond, overflowed, lambda: round_input(x, scheme, self.input_scale))

    def rounds_inputs_like(self, other: SiteRule) -> bool:
        """Whether both rules make the same of one input."""
        scales = [None if rule.input_scale is None else float(rule.input_scale) for rule in (self, other)]
        return (
            self.activations == other.activations
            and scales[0] == scales[1]
            and (self.activations is None or self.transform.agrees_with(other.transform))
        )


@contextmanager
def emulate(
    model: nn.Module,
    sites: Sequence[Site],
    rules: Mapping[str, SiteRule],
    *,
    values: Mapping[ValueSite, ValueRule] | None = None,
    in_place: bool = True,
    originals: Originals | None = None,
    counters: Counters | None = None,
) -> Iterator[nn.Module]:
    """Run `model` with other weights, rounded inputs and rounded values at some sites.

    Args:
        model: fp32 model; changed inside the block only.
        sites: all sites of the model.
        rules: site name → what it runs with; sites without an entry keep what they have.
        values: value site → what its values are rounded to (`values.py`).
        in_place: replace the weights once; False computes them anew on every call and keeps nothing.
        originals: where replaced weights lie meanwhile; None: in memory.
        counters: counts of rounded and of overflowing numbers are added to it, by matrix or value site.

    Raises:
        SchemeError: rows of one fused matrix ask for different roundings of their one input.
    """
    unknown = set(rules) - {site.name for site in sites}
    assert not unknown, f"no such sites: {sorted(unknown)[:3]}"
    changed = [matrix for matrix in matrices_of(sites) if any(site.name in rules for site in matrix.sites)]
    input_rules = {matrix.name: input_rule(matrix, rules) for matrix in changed}
    watched = [matrix for matrix in changed if not in_place or input_rules[matrix.name] is not None]

    def handle(matrix: Matrix, x: Tensor, operation: Operation) -> Tensor:
        weight = None if in_place else _changed(_stored(model, matrix), matrix, rules)
        rule = input_rules[matrix.name]
        if rule is None or (scheme := rule.activations) is None:
            return operation(x, weight)

        def count(seen: Tensor) -> None:
            assert counters is not None
            before = counters.get(matrix.name, Overflows())
            counters[matrix.name] = before + count_overflows(seen, scheme, rule.input_scale)

        return rule.multiply(x, operation, weight, None if counters is None else count)

    originals = InMemory() if originals is None else originals
    replaced: list[str] = []
    try:
        for matrix in changed if in_place else ():
            parameter = model.get_parameter(matrix.parameter)
            if matrix.parameter not in replaced:
                originals.keep(matrix.parameter, parameter.data)
                replaced.append(matrix.parameter)
                parameter.data = parameter.data.clone()
            _write_rows(_stored(model, matrix), matrix, rules)
        with ExitStack() as stack:
            if watched:
                stack.enter_context(LinearCalls(model, [site for matrix in watched for site in matrix.sites], handle))
            if values:
                stack.enter_context(emulate_values(model, values, sites=sites, counters=counters))
            yield model
    finally:
        for name in replaced:
            model.get_parameter(name).data = originals.read(name)


def _stored(model: nn.Module, matrix: Matrix) -> Tensor:
    """The matrix as its parameter stores it: a view."""
    parameter = model.get_parameter(matrix.parameter).data
    return parameter if matrix.expert is None else parameter[matrix.expert]


@torch.no_grad()
def _changed(stored: Tensor, matrix: Matrix, rules: Mapping[str, SiteRule]) -> Tensor:
    values = stored.clone()
    _write_rows(values, matrix, rules)
    return values


@torch.no_grad()
def _write_rows(stored: Tensor, matrix: Matrix, rules: Mapping[str, SiteRule]) -> None:
    matrix_NK = stored.T if matrix.transposed else stored
    for site in matrix.sites:
        rule = rules.get(site.name)
        if rule is not None:
            first, last = site.rows or (0, matrix_NK.shape[0])
            rows_NK = matrix_NK[first:last]
            values_NK = rule.quantize_weight(rows_NK.contiguous())
            rows_NK.copy_(values_NK if rule.activations is not None else rule.transform.restore(values_NK))


def input_rule(matrix: Matrix, rules: Mapping[str, SiteRule]) -> SiteRule | None:
    """The one rule by which the rows of a matrix round their input; None where it is left alone.

    Raises:
        SchemeError: they ask for different ones.
    """
    wanted = {site.name: rules.get(site.name) for site in matrix.sites}
    rounding = [rule for rule in wanted.values() if rule is not None and rule.activations is not None]
    if not rounding:
        return None
    if all(rule is not None and rule.rounds_inputs_like(rounding[0]) for rule in wanted.values()):
        return rounding[0]
    listing = "; ".join(f"{name}: {_spell(rule)}" for name, rule in wanted.items())
    raise SchemeError(
        f"the sites of {matrix.name} share one input but round it differently ({listing}); give all rows of a fused "
        "matrix one scheme, and fit one transform to all of them"
    )


def _spell(rule: SiteRule | None) -> str:
    if rule is None or rule.activations is None:
        return "as it is"
    scale = "" if rule.input_scale is None else f", scale {float(rule.input_scale):.6g}"
    changed = "" if rule.transform.is_identity else ", after a transform"
    return f"{rule.activations}{scale}{changed}"
