"""Modules that are nobody's known architecture, written by hand as people do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 260
IDS = torch.arange(22).reshape(2, 11) * 7 % VOCABULARY


class RootMeanSquare(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class Attention(nn.Module):
    """q is stored [in, out] and multiplied by einsum, k [out, in] by matmul; both products of attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Parameter(torch.randn(width, width) * 0.1)
        self.wk = nn.Parameter(torch.randn(width, width) * 0.1)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = torch.einsum("btd,de->bte", x, self.wq), x @ self.wk.T, self.v_proj(x)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = RootMeanSquare(width)
        self.attn = Attention(width, heads)
        self.norm2 = RootMeanSquare(width)
        self.fc1 = nn.Linear(width, 3 * width)
        self.fc2 = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class TinyGPT(nn.Module):
    """Ids → logits; head and embedding share their weight where tied."""

    def __init__(self, *, width: int = 32, heads: int = 4, layers: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Parameter(torch.randn(128, width) * 0.1)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = RootMeanSquare(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Answer:
    logits: Tensor


class Returning(nn.Module):
    """A GPT that takes a second input and returns its logits in some wrapping."""

    def __init__(self, gpt: TinyGPT, wrapping: str) -> None:
        super().__init__()
        self.gpt = gpt
        self.wrapping = wrapping

    def forward(self, ids: Tensor, shift: Tensor | float = 0.0) -> Any:
        logits = self.gpt(ids) + shift
        match self.wrapping:
            case "tuple":
                return (logits, ids)
            case "dict":
                return {"logits": logits, "ids": ids}
            case "object":
                return Answer(logits=logits)
        return logits


class Branching(nn.Module):
    """Takes one of two ways by the values of a tensor: no list of operators says that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if float(x.sum()) > 0 else self.second(x)


def tiny_gpt(**changes: Any) -> TinyGPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyGPT(**changes).eval().requires_grad_(False)
