"""Shapes of the models of the rows, where the rows do not give them in full.

GPT-2's form (no gate, LayerNorm, f = 4h) for rows that give layers and hidden size; the published config.json for
models with a name. nanotron's four are Llama's with as many key–value heads as heads: only so do their parameters come
to what they are called (1.34, 3.57, 8.86 and 80.0 · 10⁹ with 131,072 words; the first two share head and embedding).
"""

from __future__ import annotations

import re
from typing import Any

from bitwright.hardware.model_shape import ModelShape, shape_from_sizes


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, **more: Any) -> ModelShape:
    return shape_from_sizes(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads,
        num_kv_heads=kv,
        vocab_size=vocab,
        is_gated=True,
        norm="rms",
        **more,
    )


def _experts(name: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocab: int, e: int, k: int, d: int):
    return _llama(name, layers, hidden, ffn, heads, kv, vocab, num_experts=e, experts_per_token=k, head_dim=d)


_LLAMA = {
    "llama2-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama2-34b": (48, 8192, 22016, 64, 8, 32000),
    "llama2-70b": (80, 8192, 28672, 64, 8, 32000),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": (80, 8192, 28672, 64, 8, 128256),
    "llama3-405b": (126, 16384, 53248, 128, 8, 128256),
    "mistral-7b": (32, 4096, 14336, 32, 8, 32000),
}
_NANOTRON = {
    "1.34B": (16, 2048, 8192, 32, 32, 131072, True),
    "3.57B": (28, 3072, 8192, 24, 24, 131072, True),
    "8.86B": (32, 4096, 14336, 32, 32, 131072, False),
    "80B": (80, 8192, 28672, 64, 64, 131072, False),
}
_EXPERTS = {
    "qwen3_30b_a3b": (48, 2048, 768, 32, 4, 151936, 128, 8, 128),
    "qwen3_235b_a22b": (94, 4096, 1536, 64, 4, 151936, 128, 8, 128),
    "gpt oss 120b": (36, 2880, 2880, 64, 8, 201088, 128, 4, 64),
    "mixtral-8x22b": (56, 6144, 16384, 48, 8, 32768, 8, 2, 128),
}


def shape_of(row: dict[str, Any]) -> ModelShape | None:
    """Return the shape of a row's model, or None where it is not known."""
    name = str(row["model"])
    if name.startswith("Llama-arch "):
        *sizes, is_tied = _NANOTRON[name.removeprefix("Llama-arch ")]
        return _llama(name, *sizes, is_head_tied=is_tied)
    key = re.sub(r"[-_ ]?\(.*|\.1(?=[-_])|\.3(?=-)", "", name.lower()).strip()
    flat = key.replace("llama-", "llama").replace("llama3_", "llama3-").replace("llama ", "llama2-")
    if key in _EXPERTS:
        return _experts(name, *_EXPERTS[key])
    if flat in _LLAMA:
        return _llama(name, *_LLAMA[flat])
    if name.startswith("BLOOM-"):
        return gpt_shape(row, layers=row.get("layers") or _bloom_layers(row), is_tied=True)
    if name.startswith(("GPT-", "MPT-")) and "layers" in row and "hidden" in row:
        return gpt_shape(row, layers=row["layers"], is_tied=True)
    return None


def gpt_shape(row: dict[str, Any], *, layers: int, is_tied: bool) -> ModelShape:
    """Return a GPT with the row's sizes; heads of 128 where the row does not say."""
    hidden = row["hidden"]
    heads = row.get("heads") or hidden // 128
    return shape_from_sizes(
        name=str(row["model"]),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=row.get("ffn") or 4 * hidden,
        num_heads=heads,
        head_dim=hidden // heads,
        vocab_size=row.get("vocab") or 51200,
        is_gated=False,
        norm="layer",
        biases="none" if row["model"].startswith("MPT") else "all",
        is_head_tied=is_tied,
    )


def _bloom_layers(row: dict[str, Any]) -> int:
    """The multiple of the pipeline's stages that comes nearest to the parameters in the name."""
    billions = float(re.findall(r"[\d.]+", row["model"])[0])
    hidden, stages = row["hidden"], row["parallel"]["pp"]
    layers = (billions * 1e9 - row["vocab"] * hidden) / (12 * hidden**2)
    return max(stages, round(layers / stages) * stages)
