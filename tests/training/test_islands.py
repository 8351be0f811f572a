"""Islands hold under both autocasts: what is listed runs in fp32, or in a kernel that is measured to be as good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from cuda_autocast import CudaAutocast
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitwright.training.forward.islands import Islands, left_to_us
from bitwright.training.forward.operations import OPERATIONS, Operation, treat

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS = torch.arange(8) % 5


def positive(x: Tensor) -> Tensor:
    return x.abs() + 0.25


#: Function → calls of it as people write them; x is [8, 512], its values of size one.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "softmax": (lambda x: F.softmax(x, -1), lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), lambda x: x.log_softmax(-1)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda x: x.logsumexp(-1)),
    "cross_entropy_loss": (lambda x: F.cross_entropy(x, TOKENS),),
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
    "linalg_vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=-1),),
    "linalg_matrix_norm": (lambda x: torch.linalg.matrix_norm(x),),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x + 1, dim=-1),),
    "cdist": (lambda x: torch.cdist(x, x + 1),),
    "dist": (lambda x: torch.dist(x, x + 1),),
    "pow": (lambda x: x.pow(2), lambda x: torch.pow(x, 3), lambda x: x**2, lambda x: x**3.0, lambda x: 2.0**x),
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
}

CASES = [
    (operation, operator, call)
    for operation in OPERATIONS
    if operation.runs_in == "fp32"
    for operator in operation.operators
    for call in CALLS.get(operator, ())
]
IDS = [f"{operator}-{index}" for index, (_, operator, _) in enumerate(CASES)]


@contextmanager
def region(semantics: str, compute: str) -> Iterator[None]:
    """Autocast of a kind of device, with the islands that belong to it; CUDA's is acted out."""
    with torch.autocast("cpu", DTYPES[compute]), Islands(compute, "cpu", semantics=semantics), ExitStack() as stack:
        if semantics == "cuda":
            stack.enter_context(CudaAutocast(DTYPES[compute]))
        yield


def values(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 512, generator=generator).to(dtype)


def test_every_island_is_tried() -> None:
    listed = {name for operation in OPERATIONS if operation.runs_in == "fp32" for name in operation.operators}
    assert listed == set(CALLS)


def test_every_name_is_an_operator_of_torch() -> None:
    for operation in OPERATIONS:
        for name in operation.operators:
            assert getattr(torch.ops.aten, name).overloads(), name


@pytest.mark.parametrize("semantics", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "operator", "call"), CASES, ids=IDS)
def test_under_fp16_every_island_gives_fp32(
    operation: Operation, operator: str, call: Callable[[Tensor], Tensor], semantics: str
) -> None:
    x = values(torch.float16)
    with region(semantics, "fp16"):
        assert call(x).dtype == torch.float32
    assert treat(operation, operator, compute="fp16", device_type=semantics).format == "fp32"


@pytest.mark.parametrize("semantics", ["cpu", "cuda"])
@pytest.mark.parametrize(("operation", "operator", "call"), CASES, ids=IDS)
def test_under_bf16_every_island_gives_fp32_or_is_as_good(
    operation: Operation, operator: str, call: Callable[[Tensor], Tensor], semantics: str
) -> None:
    x = values(torch.bfloat16)
    with region(semantics, "bf16"):
        found = call(x)
    treatment = treat(operation, operator, compute="bf16", device_type=semantics)
    if treatment.by != "kernel":
        assert found.dtype == torch.float32 and treatment.format == "fp32"
        return
    assert found.dtype == torch.bfloat16
    is_of_positive = operator in ("log10", "log2", "log1p", "log", "rsqrt", "reciprocal")
    # what `positive` rounds in bf16 is no part of the function
    exact = getattr(positive(x).double(), operator)() if is_of_positive else call(x.double())
    step = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 7)
    assert bool(((found.double() - exact).abs() <= step).all())


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_what_has_a_dtype_of_its_own_keeps_it(compute: str) -> None:
    x = values(DTYPES[compute])
    with region("cpu", compute):
        assert x.softmax(-1, dtype=torch.float64).dtype == torch.float64
        assert x.cumsum(-1, dtype=torch.float32).dtype == torch.float32
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


def test_nothing_is_cast_in_fp32() -> None:
    assert not left_to_us("fp32", "cpu")
    assert not left_to_us("tf32", "cuda")


def test_few_operators_are_left_to_us_in_bf16() -> None:
    """What autocast and kernels do well stays theirs."""
    assert left_to_us("bf16", "cuda") == set()
    assert left_to_us("bf16", "cpu") == {"log_softmax", "logsumexp", "cumsum", "cumprod", "cosine_similarity", "dist"}


def test_elsewhere_nothing_changes() -> None:
    """Another autocast of the same process, before, after and around a region without its own."""
    x = values(torch.float16)
    calls = [call for name in ("softmax", "pow", "sum", "exp", "layer_norm", "logsumexp") for call in CALLS[name]]

    def plain() -> list[Tensor]:
        with torch.autocast("cpu", torch.float16):
            return [call(x) for call in calls]

    before = plain()
    with region("cpu", "fp16"):
        assert all(call(x).dtype == torch.float32 for call in calls)
        with torch.autocast("cpu", enabled=False):
            assert all(call(x).dtype == torch.float16 for call in calls)
    after = plain()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {a.dtype for a in after} == {torch.float16}


def test_regions_nest() -> None:
    x = values(torch.float16)
    with region("cpu", "fp16"):
        with region("cpu", "bf16"):
            assert x.softmax(-1).dtype == torch.float16
        assert x.softmax(-1).dtype == torch.float32


def test_gradients_pass() -> None:
    x = values(torch.float16).requires_grad_()
    with region("cpu", "fp16"):
        (x.softmax(-1) * x).sum().backward()
    y = values(torch.float16).float().requires_grad_()
    (y.softmax(-1) * y).sum().backward()
    assert x.grad is not None and y.grad is not None and x.grad.dtype == torch.float16
    assert torch.allclose(x.grad.float(), y.grad, rtol=1e-3, atol=1e-6)


def test_inside_functions_of_torch_too() -> None:
    """normalize adds 1e-12 to a norm, which is zero in fp16: a row of zeros became NaN."""
    zeros = torch.zeros(1, 16, dtype=torch.float16)
    assert bool(F.normalize(zeros, dim=-1).isnan().all())
    with region("cpu", "fp16"):
        assert bool((F.normalize(zeros, dim=-1) == 0).all())


def test_what_is_computed_again_is_the_same() -> None:
    """Activation checkpointing runs a forward pass once more in the middle of the backward pass."""

    def block(x: Tensor) -> Tensor:
        return x @ torch.eye(512, dtype=x.dtype) + x.logsumexp(-1, keepdim=True)

    gradients = []
    for checkpointed in (False, True):
        x = values(torch.bfloat16).requires_grad_()
        with Islands("bf16", "cpu"):
            with torch.autocast("cpu", torch.bfloat16):
                y = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            y.float().square().mean().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None and torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]


def test_in_compiled_functions_too() -> None:
    x = values(torch.bfloat16)
    compiled = torch.compile(lambda x: x.logsumexp(-1), backend="aot_eager")
    with region("cpu", "bf16"):
        assert torch.equal(compiled(x), x.float().logsumexp(-1))
