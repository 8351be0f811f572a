"""One weight that a forward pass uses many times (a loss in chunks, a layer in a loop): where its gradients add up.

Autocast casts a weight once, and adds up what all uses send back at that copy, in 16 bits: a thousand ones are 256.
`bf16-mixed` and `fp16-mixed` are autocast bit for bit, so they do the same; `uses="fp32"` does not. Everybody else adds
in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bitwright.errors import TrainingError
from bitwright.training import POLICIES, Policy, policy_named, prepare
from bitwright.training.forward.operation_table import operation_table

#: Where a sum of ones stops: half a step of the next number.
STOPS = {"bf16-mixed": 256, "fp16-mixed": 2048}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class Loop(nn.Module):
    """A layer whose weight is used as often as there are rows; each use's gradient is 1."""

    def __init__(self, is_head: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.is_head = is_head

    def get_output_embeddings(self) -> nn.Module | None:
        """As models of transformers say which layer is their head."""
        return self.layer if self.is_head else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row).float() for row in x]).sum()


def gradient(policy: str | Policy, num_uses: int, is_head: bool = False) -> float:
    """What a run gets as the gradient of the weight, whose exact value is the number of uses."""
    model, found = Loop(is_head), []
    run = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        policy=policy,
        monitor=lambda _: found.append(float(model.layer.weight.grad)),  # type: ignore[arg-type]
    )
    if run.scaler is not None:  # 65536 would leave fp16
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 1.0})
    with run.step() as step:
        step.backward(model(torch.ones(num_uses, 1)))
    assert run.last is not None and run.last.skipped is None
    return found[0]


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in STOPS])
def test_all_other_policies_add_in_fp32(name: str) -> None:
    assert gradient(name, 300) == pytest.approx(300, rel=1e-6)


@pytest.mark.parametrize(("name", "stop"), STOPS.items())
def test_what_is_autocast_bit_for_bit_adds_as_autocast_does(name: str, stop: int) -> None:
    model = Loop()
    with torch.autocast("cpu", AUTOCAST[name]):
        loss = model(torch.ones(stop + 100, 1))
    loss.backward()
    assert float(model.layer.weight.grad) == stop  # type: ignore[arg-type]
    assert gradient(name, stop + 100) == stop


@pytest.mark.parametrize(("name", "stop"), STOPS.items())
def test_unless_the_policy_says_fp32(name: str, stop: int) -> None:
    assert gradient(replace(policy_named(name), uses="fp32"), stop + 100) == stop + 100


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if "lm_head" in policy.keep_high])
def test_a_head_that_recipes_leave_alone_adds_as_bf16_mixed_does(name: str) -> None:
    assert gradient(name, 300, is_head=True) == 256
    assert gradient(replace(policy_named(name), uses="fp32"), 300, is_head=True) == 300


class Tied(nn.Module):
    """An embedding that is the head too: one word is read, and its row multiplied, as often as there are ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1, 1)
        nn.init.ones_(self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        read = self.embedding(ids)
        return read.float().sum() + functional.linear(torch.ones(len(ids), 1), self.embedding.weight).float().sum()


@pytest.mark.parametrize("name", POLICIES)
def test_rows_of_an_embedding_are_added_in_fp32_whatever_the_policy(name: str) -> None:
    """3000 ones from reading a word, and 3000 from the head, which 16 bits hold as 3008 at worst."""
    model, found = Tied(), []
    run = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        policy=replace(policy_named(name), loss_scale=None),
        monitor=lambda _: found.append(float(model.embedding.weight.grad)),  # type: ignore[arg-type]
    )
    with run.step() as step:
        step.backward(model(torch.zeros(3000, dtype=torch.long)))
    assert found[0] == pytest.approx(6000, abs=8)


@pytest.mark.parametrize("num_chunks", [64, 1024])
def test_a_loss_in_chunks_has_the_gradient_of_the_whole(num_chunks: int) -> None:
    """A head used once is the reference: its product adds all rows in fp32."""
    torch.manual_seed(0)
    x, labels = torch.rand(2048, 16), torch.randint(0, 8, (2048,))
    start = nn.Linear(16, 8, bias=False).weight.detach().clone()

    def total(num: int, uses: str) -> Tensor:
        head, found = nn.Linear(16, 8, bias=False), []
        head.weight.data.copy_(start)
        run = prepare(
            head,
            torch.optim.SGD(head.parameters(), lr=0.0),
            policy=replace(policy_named("bf16-mixed"), uses=uses),
            monitor=lambda _: found.append(head.weight.grad.clone()),  # type: ignore[union-attr]
        )
        with run.step() as step:
            parts = zip(x.chunk(num), labels.chunk(num), strict=True)
            losses = [functional.cross_entropy(head(rows), wanted, reduction="sum") for rows, wanted in parts]
            step.backward(torch.stack(losses).sum())
        return found[0]

    whole = total(1, "compute")
    autocasts, ours = (float((total(num_chunks, uses) - whole).norm() / whole.norm()) for uses in ("compute", "fp32"))
    assert ours < 2e-3 and autocasts > 3 * ours


def test_what_is_used_once_is_the_same_bits(make_tiny_model: Callable[..., Any]) -> None:
    def end(uses: str) -> list[Tensor]:
        model = make_tiny_model("llama").requires_grad_(True).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run = prepare(model, optimizer, policy=replace(policy_named("bf16-mixed"), uses=uses), max_grad_norm=1.0)
        ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            with run.step() as step:
                step.backward(model(input_ids=ids, labels=ids).loss)
        return list(model.parameters())

    assert all(torch.equal(here, there) for here, there in zip(end("compute"), end("fp32"), strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_the_table_says_which(name: str) -> None:
    policy = policy_named(name)
    formats = {row.what: row.format for row in operation_table(policy)}
    mixed = policy.compute if policy.compute in ("bf16", "fp16") and policy.parameters == "fp32" else "fp32"
    assert formats["gradients of a weight used many times"] == mixed
    if mixed != "fp32":
        said = {row.what: row.format for row in operation_table(replace(policy, uses="fp32"))}
        assert said["gradients of a weight used many times"] == "fp32"


def test_another_format_of_uses_is_refused() -> None:
    with pytest.raises(TrainingError, match="has uses 'fp16'; use one of compute, fp32"):
        replace(policy_named("bf16-mixed"), uses="fp16")
