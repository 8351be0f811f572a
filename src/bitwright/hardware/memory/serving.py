"""Bytes of everything that must fit when a decoder serves.

    weights       `weight_bytes` per matrix (`weights.py`)
    KV cache      `kv_cache_bytes` where all layers keep the same, `cache_bytes` for one cache of one layer
    activations   `activation_bytes`: the largest set of tensors that is alive at one moment of a step
    workspace     `workspace_bytes`: what the runtime and its kernels take for themselves

`serving_memory` adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.hardware.decoder_shape import DecoderShape
from bitwright.hardware.device import Kind
from bitwright.hardware.sizes import raise_if_negative, raise_if_not_positive

#: Tokens of all sequences together that one step of an engine runs, where a prompt is longer: vLLM's
#: DEFAULT_MAX_NUM_BATCHED_TOKENS (vllm/config/scheduler.py), which it raises on large GPUs.
STEP_TOKENS = 2048
#: Bytes that a runtime holds before any tensor exists: driver context and loaded kernels. An assumption in the middle
#: of the 300 to 700 MB that CUDA contexts of PyTorch are seen to take; a process on a CPU shares its memory.
RUNTIME_BYTES: Mapping[Kind, int] = {"gpu": 512 * 2**20, "accelerator": 512 * 2**20, "cpu": 0}
#: Scratch memory of matrix products: 32 MiB, what NVIDIA advises for cuBLAS on Hopper (cuBLAS documentation, §2.1.7
#: cublasSetWorkspace; 4 MiB on older chips).
MATMUL_WORKSPACE_BYTES = 32 * 2**20


def kv_cache_bytes(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    batch: int = 1,
    value_bits: float = 16.0,
    scale_bits_per_token_head: float = 0.0,
) -> int:
    """Return the bytes of keys and values kept for `batch` sequences of `num_tokens` tokens.

        bits = 2 · layers · batch · tokens · kv_heads · (head_dim · value_bits + scale_bits_per_token_head)

    Source: Pope et al., "Efficiently Scaling Transformer Inference", arXiv:2211.05102, §3 (the 2 is keys and values),
    with the number of key–value heads of grouped-query attention (Ainslie et al., arXiv:2305.13245) in place of all
    heads. Paged allocators round up to whole blocks of tokens, which is not counted.

    Raises:
        HardwareError: a size is not positive, or the scale's bits are negative.
    """
    raise_if_not_positive(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_tokens=num_tokens,
        batch=batch,
        value_bits=value_bits,
    )
    raise_if_negative(scale_bits_per_token_head=scale_bits_per_token_head)
    per_token_head_bits = head_dim * value_bits + scale_bits_per_token_head
    return math.ceil(2 * num_layers * batch * num_tokens * num_kv_heads * per_token_head_bits / 8)


def cache_bytes(*, num_tokens: int, num_kv_heads: int, head_dim: int, stored_bits: float, batch: int = 1) -> int:
    """Return the bytes of one cache, the keys or the values of one layer.

    Args:
        num_tokens: tokens kept of each sequence: the context, or the window where attention slides.
        num_kv_heads, head_dim: of the layer.
        stored_bits: bits of one kept value with its share of the scales (`ValueScheme.stored_bits(head_dim)`).
        batch: sequences.

    Raises:
        HardwareError: a size is not positive.
    """
    raise_if_not_positive(
        num_tokens=num_tokens, num_kv_heads=num_kv_heads, head_dim=head_dim, stored_bits=stored_bits, batch=batch
    )
    return math.ceil(batch * num_tokens * num_kv_heads * head_dim * stored_bits / 8)


def activation_bytes(
    shape: DecoderShape,
    *,
    step_tokens: int,
    logit_tokens: int,
    bits: float = 16.0,
    logit_bits: float = 48.0,
) -> int:
    """Return the bytes of the largest set of activations that is alive at one moment of a step without gradients.

    The largest of four moments, in values per token (h hidden, i intermediate, q and kv columns of the heads):

        rotating q     3h + 4q + 2kv    embeddings, the layer's input, normed; q, k, v; three terms of the rotation
        rotating k     3h + 2q + 5kv    the same, q rotated
        gating         4h + 3i          the sum after attention too; gate, up, their product
        the head       h                and logit_tokens · vocabulary logits

    as transformers holds them. An engine that writes in place needs less, so this is on the safe side.
    Attention is fused: its scores are never stored.

    Args:
        shape: of the decoder.
        step_tokens: tokens of all sequences that one step runs: the prompt, cut into chunks of at most `STEP_TOKENS`,
            or one per sequence.
        logit_tokens: tokens whose logits are formed: one per sequence when generating.
        bits: of one activation.
        logit_bits: of one logit; 48 is a 16-bit one and the fp32 copy that is sampled from.

    Raises:
        HardwareError: a size is not positive.
    """
    raise_if_not_positive(step_tokens=step_tokens, logit_tokens=logit_tokens, bits=bits, logit_bits=logit_bits)
    query_columns, kv_columns = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rotating = 3 * shape.hidden_size + max(4 * query_columns + 2 * kv_columns, 2 * query_columns + 5 * kv_columns)
    gating = 4 * shape.hidden_size + 3 * shape.intermediate_size
    layer_bits = step_tokens * max(rotating, gating) * bits
    head_bits = step_tokens * shape.hidden_size * bits + logit_tokens * shape.vocab_size * logit_bits
    return math.ceil(max(layer_bits, head_bits) / 8)


def workspace_bytes(kind: Kind, *, widened_weights: int = 0) -> int:
    """Return the bytes that the runtime and its kernels take: a stated rule, not a measurement.

        RUNTIME_BYTES of the kind of device + MATMUL_WORKSPACE_BYTES + 2 · widened_weights

    Args:
        kind: of the device.
        widened_weights: weights of the largest matrix that is widened to 16 bits as a whole before it is multiplied;
            0 where kernels widen in registers.

    Raises:
        HardwareError: a negative number of weights.
    """
    raise_if_negative(widened_weights=widened_weights)
    return RUNTIME_BYTES[kind] + MATMUL_WORKSPACE_BYTES + 2 * widened_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingMemory:
    """What must fit into a device when a decoder serves, in bytes."""

    weights: int
    kv_cache: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.activations + self.workspace


def serving_memory(
    shape: DecoderShape,
    kind: Kind,
    *,
    weights: int,
    kv_cache: int,
    batch: int,
    context: int,
    step_tokens: int = STEP_TOKENS,
    widened_weights: int = 0,
) -> ServingMemory:
    """Add up what must fit: the given weights and caches, and what follows from the shapes.

    Args:
        shape, kind: of the decoder and of the device.
        weights, kv_cache: bytes that the choices of a plan come to.
        batch, context: sequences, and tokens of each that the cache holds.
        step_tokens: most tokens that one step runs; a shorter context fills less.
        widened_weights: see `workspace_bytes`.

    Raises:
        HardwareError: a size is not positive.
    """
    raise_if_not_positive(weights=weights, batch=batch, context=context, step_tokens=step_tokens)
    raise_if_negative(kv_cache=kv_cache)
    in_one_step = max(batch, min(batch * context, step_tokens))
    return ServingMemory(
        weights=weights,
        kv_cache=kv_cache,
        activations=activation_bytes(shape, step_tokens=in_one_step, logit_tokens=batch),
        workspace=workspace_bytes(kind, widened_weights=widened_weights),
    )
