"""Which operation of a model runs in which format, and why: our own list, one for all devices.

    compute   products of matrices: the policy's format
    fp32      what adds up many numbers, what leaves fp16's range, losses: the islands
    widest    what joins tensors: the widest of their dtypes

Autocast carries out the first on every device, and the second as far as its lists go (`autocast_lists.py`). What is
left is carried out here, by `islands.py`, save in one case: a kernel that adds in fp32 inside, so that its result is
within one step of bf16 of the exact one however much it adds, is as good as fp32 in bf16, which has fp32's range. There
the input stays as autocast has it, and so do the bits of the loss. In fp16 a result that was rounded may have
overflowed, so there everything listed is cast.

`exact_on` says which kernels those are; tests measure it. Torch's log_softmax of bf16 on a CPU, say, is none: where a
token is almost certain it is wrong by four steps.

Source of the list: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.3, and where runs were
seen to fail: mean squares of norms, logsumexp of losses over a large vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.training.forward.autocast_lists import lists_of

RunsIn = Literal["compute", "fp32", "widest"]
#: Who sees to it: autocast, we, a kernel that computes in fp32 anyway, or torch's rules of promotion.
By = Literal["autocast", "bitwright", "kernel", "torch"]

#: A format whose largest number is beyond this has the range of fp32.
_FP32_RANGE = 1e38
#: Wider formats are fp32 in memory, and nothing is cast.
_NARROW_BITS = 16
#: Kinds of devices that torch tells how many bits of fp32 to multiply.
MATRIX_UNITS = ("cuda",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Operators of ATen that are one operation, and where it belongs."""

    #: What it is called in tables.
    title: str
    #: Names of ATen operators, without overloads.
    operators: tuple[str, ...]
    runs_in: RunsIn
    why: str
    #: Kinds of devices whose kernels take bf16 and give what is within one step of the exact result. "*": all.
    exact_on: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What happens to an operator under a format on a kind of device."""

    format: str
    by: By


def _operation(title: str, operators: str, runs_in: RunsIn, why: str, *, exact_on: str = "") -> Operation:
    return Operation(
        title=title,
        operators=tuple(operators.split()),
        runs_in=runs_in,
        why=why,
        exact_on=tuple(exact_on.split()),
    )


_PRODUCT = "takes the time; sums are fp32"
_SUM = "adds up many numbers"
_RANGE = "leaves fp16's range"
_LOSS = "gradients start here"

OPERATIONS: tuple[Operation, ...] = (
    _operation("linear layers", "linear", "compute", _PRODUCT),
    _operation("products of matrices", "matmul mm bmm addmm baddbmm addbmm", "compute", _PRODUCT),
    _operation("attention", "scaled_dot_product_attention", "compute", "takes the time; softmax and sums are fp32"),
    _operation("convolutions", "conv1d conv2d conv3d", "compute", _PRODUCT),
    _operation("softmax", "softmax", "fp32", _SUM, exact_on="cpu"),
    _operation("log-softmax", "log_softmax", "fp32", _SUM),
    _operation("logsumexp", "logsumexp", "fp32", _SUM),
    # on CUDA autocast casts the two that cross_entropy_loss is made of
    _operation("cross-entropy", "cross_entropy_loss nll_loss", "fp32", _LOSS),
    _operation(
        "other losses",
        "kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits poisson_nll_loss "
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
        "norms of vectors", "norm linalg_vector_norm linalg_matrix_norm", "fp32", f"{_SUM}, squared", exact_on="cpu"
    ),
    _operation("distances", "cosine_similarity cdist dist", "fp32", _SUM),
    _operation("powers", "pow", "fp32", _RANGE, exact_on="*"),
    _operation(
        "exp, log, squares and such",
        "square exp expm1 log log1p log2 log10 rsqrt reciprocal softplus sinh cosh tan",
        "fp32",
        _RANGE,
        exact_on="*",
    ),
    _operation("activation functions", "gelu silu relu tanh sigmoid", "widest", "one number in, one number out"),
    _operation("sums of two tensors", "add mul sub", "widest", "the wider of both"),
    _operation("joining tensors", "cat stack", "widest", "the wider of both"),
)


def has_fp32_range(format_name: str) -> bool:
    """Whether what fp32 holds does not overflow in a format."""
    return float(formats.FORMATS[format_name].max) > _FP32_RANGE


def treat(operation: Operation, operator: str, *, compute: str, device_type: str) -> Treatment:
    """What happens to an operator of an operation.

    Args:
        operation: of `OPERATIONS`.
        operator: one of its operators.
        compute: the policy's format of products.
        device_type: kind of device, as torch calls it.
    """
    bits = formats.FORMATS[compute].bits
    if bits > _NARROW_BITS:
        if operation.runs_in != "compute":
            return Treatment(format="fp32", by="torch")
        is_emulated = bits < formats.FORMATS["fp32"].bits and device_type not in MATRIX_UNITS
        return Treatment(format=compute, by="bitwright" if is_emulated else "torch")
    if operation.runs_in != "fp32":
        by: By = "autocast" if operation.runs_in == "compute" else "torch"
        return Treatment(format=compute if by == "autocast" else "widest", by=by)
    if operator in lists_of(device_type).fp32 or _is_made_of_listed(operator, device_type):
        return Treatment(format="fp32", by="autocast")
    if has_fp32_range(compute) and {device_type, "*"} & {*operation.exact_on}:
        return Treatment(format=compute, by="kernel")
    return Treatment(format="fp32", by="bitwright")


#: Operator that torch takes apart before autocast sees it → its parts.
_PARTS = {"cross_entropy_loss": ("log_softmax", "nll_loss")}


def _is_made_of_listed(operator: str, device_type: str) -> bool:
    parts = _PARTS.get(operator)
    return parts is not None and lists_of(device_type).fp32.issuperset(parts)
