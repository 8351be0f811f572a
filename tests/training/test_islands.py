"""Islands hold under both autocasts: what is listed runs in fp32, or in a kernel that is measured to be as good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from tests.training.cuda_autocast import CudaAutocast
from torch import Tensor
from torch.nn import functional as F

from bitwright.training.islands import Islands, functions_of
from bitwright.training.operations import OPERATIONS, Operation, treat

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS = torch.arange(8) % 5


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.25


#: Function → calls of it as people write them; x is [8, 512], its values of size one.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "softmax": (lambda x: F.softmax(x, -1), lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), lambda x: x.log_softmax(-1)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda x: x.logsumexp(-1)),
    "cross_entropy": (lambda x: F.cross_entropy(x, TOKENS),),
    "nll_loss": (lambda x: F.nll_loss(x, TOKENS),),
    "kl_div": (lambda x: F.kl_div(x, positive(x), reduction="sum"),),
    "mse_loss": (lambda x: F.mse_loss(x, x + 1),),
    "l1_loss": (lambda x: F.l1_loss(x, x + 1),),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, x + 1),),
    "huber_loss": (lambda x: F.huber_loss(x, x + 1),),
    "binary_cross_entropy_with_logits": (lambda x: F.binary_cross_entropy_with_logits(x, positive(x)),),
    "poisson_nll_loss": (lambda x: F.poisson_nll_loss(x, positive(x)),),
    "cosine_embedding_loss": (lambda x: F.cosine_embedding_loss(x, x + 1, torch.ones(8)),),
    "hinge_embedding_loss": (lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)),),
    "margin_ranking_loss": (lambda x: F.margin_ranking_loss(x, x + 1, torch.ones_like(x)),),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, torch.ones_like(x)),),
    "triplet_margin_loss": (lambda x: F.triplet_margin_loss(x, x + 1, x - 1),),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, TOKENS),),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.long)),),
    "layer_norm": (lambda x: F.layer_norm(x, (512,)),),
    "rms_norm": (lambda x: F.rms_norm(x, (512,)),),
    "group_norm": (lambda x: F.group_norm(x, 4),),
    "sum": (lambda x: x.sum(), lambda x: x.sum(-1), lambda x: torch.sum(x, -1)),
    "mean": (lambda x: x.mean(), lambda x: x.mean(-1, keepdim=True), lambda x: torch.mean(x)),
    "var": (lambda x: x.var(-1), lambda x: torch.var(x)),
    "std": (lambda x: x.std(-1), lambda x: torch.std(x)),
    "cumsum": (lambda x: x.cumsum(-1), lambda x: torch.cumsum(x, -1)),
    "cumprod": (lambda x: positive(x).cumprod(-1)[:, :8],),
    "prod": (lambda x: positive(x)[:, :8].prod(-1), lambda x: torch.prod(positive(x)[:, :8], -1)),
    "norm": (lambda x: x.norm(), lambda x: torch.norm(x), lambda x: torch.linalg.norm(x)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=-1),),
    "matrix_norm": (lambda x: torch.linalg.matrix_norm(x),),
    "normalize": (lambda x: F.normalize(x, dim=-1),),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x + 1, dim=-1),),
    "cdist": (lambda x: torch.cdist(x, x + 1),),
    "dist": (lambda x: torch.dist(x, x + 1),),
    "pow": (lambda x: x.pow(2), lambda x: torch.pow(x, 3)),
    "__pow__": (lambda x: x**2, lambda x: x**3.0),
    "__rpow__": (lambda x: 2.0**x,),
    "square": (lambda x: x.square(), lambda x: torch.square(x)),
    "exp": (lambda x: x.exp(), lambda x: torch.exp(x)),
    "expm1": (lambda x: x.expm1(), lambda x: torch.special.expm1(x)),
    "log": (lambda x: positive(x).log(), lambda x: torch.log(positive(x))),
    "log1p": (lambda x: positive(x).log1p(),),
    "log2": (lambda x: positive(x).log2(),),
    "log10": (lambda x: positive(x).log10(),),
    "rsqrt": (lambda x: positive(x).rsqrt(), lambda x: torch.rsqrt(positive(x))),
    "reciprocal": (lambda x: positive(x).reciprocal(),),
    "softplus": (lambda x: F.softplus(x),),
    "sinh": (lambda x: x.sinh(),),
    "cosh": (lambda x: x.cosh(),),
    "tan": (lambda x: x.tan(),),
    "arange": (lambda x: torch.arange(600, dtype=x.dtype),),
    "linspace": (lambda x: torch.linspace(0, 599, 600, dtype=x.dtype),),
}

CASES = [
    (operation, function, call)
    for operation in OPERATIONS
    if operation.runs_in == "fp32"
    for function in operation.functions
    for call in CALLS.get(function, ())
]
IDS = [f"{function}-{index}" for index, (_, function, _) in enumerate(CASES)]


@contextmanager
def region(semantics: str, compute: str) -> Iterator[None]:
    """Autocast of a kind of device, with the islands that belong to it; CUDA's is acted out."""
    with ExitStack() as stack:
        if semantics == "cpu":
            stack.enter_context(torch.autocast("cpu", DTYPES[compute]))
        else:
            stack.enter_context(CudaAutocast(DTYPES[compute]))
        stack.enter_context(Islands(compute, semantics))
        yield


def values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 512, generator=generator).to(dtype)


def test_every_island_is_tried() -> None:
    listed = {name for operation in OPERATIONS if operation.runs_in == "fp32" for name in operation.functions}
    assert listed == set(CALLS)


def test_every_name_is_a_function_of_torch() -> None:
    for operation in OPERATIONS:
        assert {name for name, _ in functions_of(operation)} == set(operation.functions)


@pytest.mark.parametrize("semantics", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "function", "call"), CASES, ids=IDS)
def test_under_fp16_every_island_gives_fp32(
    operation: Operation, function: str, call: Callable[[Tensor], Tensor], semantics: str
) -> None:
    x = values(torch.float16)
    with region(semantics, "fp16"):
        assert call(x).dtype == torch.float32
    assert treat(operation, function, compute="fp16", device_type=semantics).format == "fp32"


@pytest.mark.parametrize("semantics", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "function", "call"), CASES, ids=IDS)
def test_under_bf16_every_island_gives_fp32_or_is_as_good(
    operation: Operation, function: str, call: Callable[[Tensor], Tensor], semantics: str
) -> None:
    x = values(torch.bfloat16)
    with region(semantics, "bf16"):
        found = call(x)
    treatment = treat(operation, function, compute="bf16", device_type=semantics)
    if treatment.by != "kernel":
        assert found.dtype == torch.float32 and treatment.format == "fp32"
        return
    assert found.dtype == torch.bfloat16
    is_of_positive = function in ("log10", "log2", "log1p", "log", "rsqrt", "reciprocal")
    # what `positive` rounds in bf16 is no part of the function
    exact = getattr(positive(x).double(), function)() if is_of_positive else call(x.double())
    step = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert bool(((found.double() - exact).abs() <= step).all())


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_what_has_a_dtype_of_its_own_keeps_it(compute: str) -> None:
    x = values(DTYPES[compute])
    with region("cpu", compute):
        assert x.softmax(-1, dtype=torch.float64).dtype == torch.float64
        assert torch.arange(5).dtype == torch.int64
        assert torch.arange(5, dtype=torch.float64).dtype == torch.float64
        assert x.double().logsumexp(-1).dtype == torch.float64
        assert torch.logsumexp(x, -1, out=torch.empty(8, dtype=x.dtype)).dtype == x.dtype


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("name", ["softmax", "sum", "mean", "var", "norm", "rms_norm", "layer_norm"])
def test_what_is_left_to_a_kernel_may_be_long(name: str, size: int) -> None:
    """Sums of 50 000 numbers, as over a vocabulary."""
    x = (size * torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))).bfloat16()
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        "var": lambda x: x.var(-1),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "rms_norm": lambda x: F.rms_norm(x, (50_000,)),
        "layer_norm": lambda x: F.layer_norm(x, (50_000,)),
    }
    found, exact = calls[name](x).double(), calls[name](x.double())
    step = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert bool(((found - exact).abs() <= step).all())


def test_log_softmax_in_bf16_is_not_left_to_its_kernel() -> None:
    x = (10 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = x.double().log_softmax(-1)
    step = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert bool(((x.log_softmax(-1).double() - exact).abs() > 2 * step).any())
    with region("cpu", "bf16"):
        assert x.log_softmax(-1).dtype == torch.float32


def test_a_mean_of_squares_beyond_fp16_is_finite() -> None:
    """RMSNorm of 300s: its mean of squares is 90 000, and fp16 ends at 65 504."""
    x = torch.full((1, 512), 300.0, dtype=torch.float16)
    assert not x.pow(2).mean(-1).isfinite()
    with region("cpu", "fp16"):
        assert x.pow(2).mean(-1).item() == 90000
        assert x.square().mean(-1).item() == 90000


def test_positions_are_all_different() -> None:
    assert torch.arange(1000, dtype=torch.bfloat16).unique().numel() == 507
    with region("cpu", "bf16"):
        assert torch.arange(1000, dtype=torch.bfloat16).unique().numel() == 1000


def test_nothing_is_cast_in_fp32() -> None:
    assert not Islands("fp32", "cpu")._handlers
    assert not Islands("tf32", "cuda")._handlers


def test_few_functions_are_left_to_us_in_bf16() -> None:
    """What autocast and kernels do well stays theirs: softmax, norms and losses are not touched."""
    theirs = {torch.softmax, F.layer_norm, F.cross_entropy, torch.Tensor.pow, torch.exp, torch.Tensor.mean, torch.sum}
    for device_type in ("cpu", "cuda"):
        assert not theirs & set(Islands("bf16", device_type)._handlers)
