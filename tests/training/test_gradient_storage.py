"""Gradients of bf16 parameters in fp32: what autograd stores, what embeddings add."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from bitwright.training.gradient_storage import keep_gradients_fp32


class Tied(nn.Module):
    """An embedding that is the output head too, and a frozen layer."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, **settings)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(ids))
        hidden = self.norm(hidden.float()).to(hidden.dtype)
        return functional.linear(hidden, self.embedding.weight)


def model(**settings: object) -> Tied:
    torch.manual_seed(0)
    made = Tied(**settings).bfloat16()
    made.norm.float()
    return made


def test_gradients_are_fp32_where_parameters_are_not() -> None:
    tied = model()
    kept = keep_gradients_fp32(tied)
    assert kept.parameters == ("embedding.weight",) and kept.embeddings == ("embedding",)
    tied(torch.arange(11)).float().square().sum().backward()
    assert tied.embedding.weight.grad.dtype == tied.norm.weight.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert tied.embedding.weight.dtype == torch.bfloat16 and tied.frozen.weight.grad is None


def test_the_forward_pass_is_the_same_bit_for_bit() -> None:
    plain, kept = model(), model()
    keep_gradients_fp32(kept)
    ids = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(ids), kept(ids))


def test_micro_batches_are_added_in_fp32() -> None:
    """A thousand equal gradients of 1: the sum in bf16 stops at 256."""

    def total(keeps: bool) -> float:
        layer = nn.Linear(1, 1, bias=False).bfloat16()
        if keeps:
            keep_gradients_fp32(layer)
        for _ in range(1000):
            layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        return float(layer.weight.grad)  # type: ignore[arg-type]

    assert (total(False), total(True)) == (256.0, 1000.0)


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_rows_of_an_embedding_are_added_in_fp32(settings: dict[str, object]) -> None:
    torch.manual_seed(1)
    narrow = nn.Embedding(5, 4, **settings).bfloat16()  # type: ignore[arg-type]
    wide = nn.Embedding(5, 4, **settings)  # type: ignore[arg-type]
    wide.weight.data.copy_(narrow.weight.data)
    keep_gradients_fp32(narrow)
    ids = torch.randint(0, 5, (4000,))
    gradient = torch.rand(4000, 4).bfloat16()
    narrow(ids).backward(gradient)
    wide(ids).backward(gradient.float())
    assert torch.allclose(narrow.weight.grad, wide.weight.grad, rtol=1e-6)  # type: ignore[arg-type]
    assert narrow.weight.grad.dtype == torch.float32  # type: ignore[union-attr]


@pytest.mark.parametrize(("settings", "said"), [({"sparse": True}, "sparse"), ({"max_norm": 1.0}, "max_norm")])
def test_embeddings_that_are_left_alone_are_said(settings: dict[str, object], said: str) -> None:
    kept = keep_gradients_fp32(nn.Embedding(5, 4, **settings).bfloat16())  # type: ignore[arg-type]
    assert kept.embeddings == () and said in kept.left_alone[0][1]


def test_what_was_changed_is_taken_back() -> None:
    tied = model()
    keep_gradients_fp32(tied).remove()
    tied(torch.arange(11)).float().square().sum().backward()
    assert tied.embedding.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert "forward" not in tied.embedding.__dict__


def test_fp32_models_are_not_touched() -> None:
    tied = Tied()
    kept = keep_gradients_fp32(tied)
    assert (kept.parameters, kept.embeddings) == ((), ()) and "forward" not in tied.embedding.__dict__
