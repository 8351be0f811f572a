"""Which operation of a model runs in which format, and why: our own list, one for all devices.

    compute   products of matrices: the policy's format
    fp32      what adds up many numbers, what leaves fp16's range, losses, positions: the islands
    widest    what joins tensors: the widest of their dtypes

Autocast carries out the first on every device, and the second as far as its lists go (`autocast_lists.py`). What is
left is carried out here, by `islands.py`, save in one case: a kernel that adds in fp32 inside, so that its result is
within one step of bf16 of the exact one however much it adds, is as good as fp32 in bf16, which has fp32's range. There
the input stays as autocast has it, and so do the bits of the loss. In fp16 a result that was rounded may have
overflowed, so there everything listed is cast.

`within_a_step` says which kernels those are; tests measure it. Torch's log_softmax of bf16 on a CPU, say, is none:
where a token is almost certain it is wrong by four steps. Source of the list: Micikevicius et al., Mixed Precision
Training, arXiv:1710.03740, section 3.3, and where runs were seen to fail: mean squares of norms, logsumexp of losses
over a large vocabulary, positions made by `arange` in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.training.autocast_lists import lists_of

RunsIn = Literal["compute", "fp32", "widest"]
By = Literal["autocast", "bitwright", "kernel", "torch"]

#: A format whose largest number is beyond this has the range of fp32.
_FP32_RANGE = 1e38
#: Wider formats are fp32 in memory, and nothing is cast.
_NARROW_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Functions of torch that are one operation, and where it belongs."""

    #: What it is called in tables.
    title: str
    #: Names of the functions, each in torch, torch.Tensor, torch.nn.functional, torch.linalg and torch.special.
    functions: tuple[str, ...]
    runs_in: RunsIn
    why: str
    #: Kinds of devices whose kernels take bf16 and give what is within one step of the exact result. "*": all.
    within_a_step: tuple[str, ...] = ()
    #: ATen operators behind the functions, where autocast's lists call them otherwise.
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What happens to an operation under a format on a kind of device."""

    format: str
    #: Who sees to it: autocast, we, or the kernel, which computes in fp32 anyway; "torch": its rules of promotion.
    by: By


def _operation(
    title: str, functions: str, runs_in: RunsIn, why: str, *, exact_on: str = "", aten: str = ""
) -> Operation:
    return Operation(
        title=title,
        functions=tuple(functions.split()),
        runs_in=runs_in,
        why=why,
        within_a_step=tuple(exact_on.split()),
        operators=tuple(aten.split()),
    )


_SUM = "adds up many numbers"
_RANGE = "leaves fp16's range"
_LOSS = "gradients start here"

OPERATIONS: tuple[Operation, ...] = (
    _operation("linear layers", "linear", "compute", "takes the time; sums are fp32"),
    _operation(
        "products of matrices",
        "matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addbmm einsum",
        "compute",
        "takes the time; sums are fp32",
    ),
    _operation(
        "attention",
        "scaled_dot_product_attention",
        "compute",
        "takes the time; softmax and sums are fp32",
    ),
    _operation("convolutions", "conv1d conv2d conv3d", "compute", "takes the time; sums are fp32"),
    _operation("softmax", "softmax", "fp32", _SUM, exact_on="cpu"),
    _operation("log-softmax", "log_softmax", "fp32", _SUM),
    _operation("logsumexp", "logsumexp", "fp32", _SUM),
    _operation("cross-entropy", "cross_entropy", "fp32", _LOSS, aten="cross_entropy_loss nll_loss"),
    _operation(
        "other losses",
        "nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits poisson_nll_loss "
        "cosine_embedding_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss multilabel_margin_loss",
        "fp32",
        _LOSS,
    ),
    _operation("layer norm", "layer_norm", "fp32", _SUM, exact_on="cpu"),
    _operation("RMS norm", "rms_norm", "fp32", f"{_SUM}, squared", exact_on="cpu"),
    _operation("group norm", "group_norm", "fp32", _SUM, exact_on="cpu"),
    _operation("sums", "sum", "fp32", _SUM, exact_on="cpu"),
    _operation("means", "mean", "fp32", _SUM, exact_on="*"),
    _operation("variances", "var std", "fp32", _SUM, exact_on="*"),
    _operation("running sums and products", "cumsum cumprod", "fp32", _SUM),
    _operation("products of many numbers", "prod", "fp32", _RANGE),
    _operation(
        "norms of vectors", "norm vector_norm matrix_norm", "fp32", _SUM, exact_on="cpu", aten="norm linalg_vector_norm"
    ),
    _operation("normalising", "normalize", "fp32", "its 1e-12 is zero in fp16"),
    _operation("distances", "cosine_similarity cdist dist", "fp32", _SUM),
    _operation("powers", "pow __pow__ __rpow__", "fp32", _RANGE, exact_on="*", aten="pow"),
    _operation(
        "squares, exp, log and such",
        "square exp expm1 log log1p log2 log10 rsqrt reciprocal softplus sinh cosh tan",
        "fp32",
        _RANGE,
        exact_on="*",
    ),
    _operation("positions", "arange linspace", "fp32", "bf16 counts to 256, fp16 to 2048"),
    _operation(
        "activation functions",
        "gelu silu relu tanh sigmoid",
        "widest",
        "one number in, one number out",
    ),
    _operation("sums of two tensors", "add __add__ mul __mul__ sub __sub__", "widest", "the wider of both"),
    _operation("joining tensors", "cat stack", "widest", "the wider of both"),
)


def has_fp32_range(format_name: str) -> bool:
    """Whether what fp32 holds does not overflow in a format."""
    return float(formats.FORMATS[format_name].max) > _FP32_RANGE


def treat(operation: Operation, function: str, *, compute: str, device_type: str) -> Treatment:
    """What happens to a function of an operation.

    Args:
        operation: of `OPERATIONS`.
        function: one of its functions.
        compute: the policy's format of products.
        device_type: kind of device, as torch calls it.
    """
    if formats.FORMATS[compute].bits > _NARROW_BITS:
        return Treatment(format=compute if operation.runs_in == "compute" else "fp32", by="torch")
    if operation.runs_in != "fp32":
        by: By = "autocast" if operation.runs_in == "compute" else "torch"
        return Treatment(format=compute if by == "autocast" else "widest", by=by)
    if {function, *operation.operators} & lists_of(device_type).fp32:
        return Treatment(format="fp32", by="autocast")
    if has_fp32_range(compute) and {device_type, "*"} & {*operation.within_a_step}:
        return Treatment(format=compute, by="kernel")
    return Treatment(format="fp32", by="bitwright")
