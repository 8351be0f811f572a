"""How each site of a plan is multiplied, and why: settled for all sites before a model is touched.

    packed    codes stay packed in memory and are expanded inside the kernel
    native    torch's own operators multiply: codes with codes, or numbers with codes that stay packed; a plan with a
              site of which that is not true is refused
    auto      codes times codes native where the device has that, else packed

Numbers meet packed codes in our own kernels unless native is asked for: on a CPU torch's INT4 and INT8 operators take
more bytes, and longer than torch's bf16 at 16 tokens (`quantize/matmuls/torch_packed.py`). The reason says so.

A scheme without scales whose format is what the model computes in (bf16 weights in a bf16 model) needs no kernel of
its own in any mode. Where inputs are rounded to codes under scales, a packed product takes them in fp32: values of fp8
codes are no numbers of bf16 (`input_rounding.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bitwright import formats
from bitwright.errors import PlanError
from bitwright.inference.modes import Mode, spell_dtype
from bitwright.inference.packed.native_rows import NativeProduct, select_native, select_native_layout
from bitwright.plan import SiteChoice
from bitwright.quantize.pack import stored_dtype
from bitwright.quantize.packed_matmul import select_matmul
from bitwright.quantize.scheme import Scheme, TensorScheme

#: Sites that an error names.
_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiplication:
    """How one site is multiplied."""

    kind: Literal["plain", "native", "packed"]
    #: What multiplies: "bf16", a kernel, or a packed layout.
    kernel: str
    reason: str
    #: What inputs are when they are multiplied as numbers.
    inputs_dtype: torch.dtype
    #: What multiplies codes with codes; None where inputs stay numbers, of whatever kind.
    native: NativeProduct | None = None
    #: The same without what was passed over, and that one by one; None and none where nothing was.
    own_reason: str | None = None
    passed_over: tuple[str, ...] = ()


def choose(scheme: Scheme, shape: tuple[int, int], mode: Mode, device_type: str, dtype: torch.dtype) -> Multiplication:
    """How a site of that scheme and shape is multiplied in a model that computes in `dtype`.

    Raises:
        SchemeError: no packed layout has the scheme.
    """
    name = spell_dtype(dtype)
    if scheme.weights is None:
        return Multiplication(kind="plain", kernel=name, reason="no choice was made here", inputs_dtype=dtype)
    if is_stored_in(scheme.weights, dtype) and (scheme.activations is None or is_stored_in(scheme.activations, dtype)):
        reason = f"{scheme.name} is what the model computes in"
        return Multiplication(kind="plain", kernel=name, reason=reason, inputs_dtype=dtype)
    native = select_native(scheme, device_type)
    if mode != "packed" and native.product is not None:
        return Multiplication(
            kind="native",
            kernel=native.product.name,
            reason=native.reason,
            inputs_dtype=dtype,
            native=native.product,
        )
    exact = scheme.activations is None or is_stored_in(scheme.activations, dtype)
    inputs_dtype = dtype if exact else torch.float32
    operator, why_operator = None, native.reason
    if scheme.activations is None:
        operator, why_operator = select_native_layout(scheme.weights, shape, device_type, dtype)
    if mode == "native" and operator is not None:
        return Multiplication(kind="native", kernel=operator.name, reason=why_operator, inputs_dtype=dtype)
    selection = select_matmul(scheme.weights, shape, device_type, inputs_dtype)
    if operator is not None:
        why_operator = f"{operator.name} would do, with more bytes, and slower than bf16 at 16 tokens"
    not_native = () if mode == "packed" else (f"not native: {why_operator}",)
    return Multiplication(
        kind="packed",
        kernel=selection.layout.name,
        reason="; ".join((selection.reason, *not_native)),
        inputs_dtype=inputs_dtype,
        own_reason=selection.layout.description,
        passed_over=(*selection.passed_over, *not_native),
    )


def is_stored_in(tensor: TensorScheme, dtype: torch.dtype) -> bool:
    """Whether a tensor of that scheme is nothing but numbers of a dtype."""
    return tensor.scaling is None and stored_dtype(formats.FORMATS[tensor.format]) == dtype


def raise_if_not_native(plan_name: str, chosen: dict[str, tuple[SiteChoice, Multiplication]]) -> None:
    """Refuse a plan in which something is multiplied otherwise than natively.

    Raises:
        PlanError: the sites, and why.
    """
    others = [(choice, found) for choice, found in chosen.values() if found.kind == "packed"]
    if not others:
        return
    listed = "; ".join(
        f"{choice.name} ({choice.scheme}: {_why_not_native(found)})" for choice, found in others[:_NAMED]
    )
    more = f"; and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    raise PlanError(
        f"{len(others)} of {len(chosen)} sites of the plan for {plan_name!r} are not multiplied natively here: {listed}"
        f"{more}; run it with mode auto, which is native where it can be"
    )


def _why_not_native(found: Multiplication) -> str:
    """Why a packed site is not native."""
    return found.reason.rpartition("not native: ")[2]
