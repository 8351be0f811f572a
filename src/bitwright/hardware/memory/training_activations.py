"""What a forward pass leaves for the backward pass: the tensors that autograd keeps, layer by layer.

Values per token of one transformer layer (h hidden, q and kv columns of the heads, a heads, s tokens of a sequence, f
columns of the MLP, times the experts that a token visits):

    norm 1        h     its input; RMS norms written out in torch also keep the normed h, before the gain
    q, k, v in    h     once if products read the norm's own format, else a cast for each matrix
    attention     q + 2kv + q and a log-sum-exp each head where fused; else also a·s probabilities
    out in        q     the same tensor as the output of a fused attention
    norm 2        h     as norm 1
    gate, up in   h     as q, k, v
    gate          f     input of the activation function; a plain MLP has only this and `down in`
    act, up       2f    the two factors of their product, where there is a gate
    down in       f
    dropout       a mask where there is dropout: after attention and MLP h each, inside attention a·s and its output

For a GPT in 16 bits with dropout this is `s·b·h·(34 + 5·a·s/h)` bytes per layer: V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198, equation 1; with tensor parallelism over t GPUs
`s·b·h·(10 + 24/t + 5·a·s/(h·t))` (equation 2) and, tokens divided too, everything over t (equation 4). A test holds
this file against both, and against what PyTorch keeps (`saved_tensors_hooks`).

Recomputed whole (`recompute="full"`) a layer leaves only its input, and one layer at a time has all of the above.
Softmax and its sum are counted in the format that products read where attention is not fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bitwright.errors import HardwareError
from bitwright.hardware.model_shape import ModelShape
from bitwright.hardware.sizes import raise_if_negative, raise_if_not_positive

Recompute = Literal["none", "full"]
Attention = Literal["fused", "stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationSetup:
    """In which formats a step computes, and what it keeps.

    Raises:
        HardwareError: a size is not positive, an unknown way to recompute or to attend.
    """

    #: Sequences that one GPU runs at once, and tokens of each.
    batch: int
    sequence: int
    #: Bits of the residual stream: of the model's parameters, also under autocast.
    stream_bits: float = 16.0
    #: Bits of what products read, and of what they give.
    compute_bits: float = 16.0
    #: Bits that a linear layer keeps of its input: codes and their scales under a recipe of fewer bits; None: as above.
    input_bits: float | None = None
    #: Bits of what an RMS norm keeps of its input: PyTorch models widen it first.
    norm_bits: float = 32.0
    #: "fused": flash attention, which keeps no scores; "stored": they are written out.
    attention: Attention = "fused"
    #: Whether K and V of grouped heads are first copied to all heads.
    is_kv_repeated: bool = False
    #: Whether a norm keeps its normed input beside its input: RMS norms written out in torch do.
    keeps_normed: bool = True
    #: Bits of a dropout mask (8 in PyTorch on GPUs); 0 without dropout.
    dropout_bits: float = 0.0
    #: Tensors that the activation function keeps: 1 where it is one kernel (the tanh form of GELU in torch: 4).
    activation_tensors: int = 1
    #: Whether each matrix keeps a cast of its own of an input that it shares with others. None: it does where the
    #: residual stream has other bits, as under autocast.
    casts_each_input: bool | None = None
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        raise_if_not_positive(
            batch=self.batch,
            sequence=self.sequence,
            stream_bits=self.stream_bits,
            compute_bits=self.compute_bits,
            norm_bits=self.norm_bits,
            activation_tensors=self.activation_tensors,
        )
        raise_if_negative(dropout_bits=self.dropout_bits)
        for name, value, known in (
            ("recompute", self.recompute, get_args(Recompute)),
            ("attention", self.attention, get_args(Attention)),
        ):
            if value not in known:
                raise HardwareError(f"{name} is {value!r}; there are {', '.join(known)}")

    @property
    def kept_input_bits(self) -> float:
        """Bits that a linear layer keeps of each number of its input."""
        return self.compute_bits if self.input_bits is None else self.input_bits

    @property
    def casts(self) -> bool:
        """Whether each matrix keeps a cast of its own of the input that it shares with others."""
        differs = self.stream_bits != self.kept_input_bits
        return differs if self.casts_each_input is None else self.casts_each_input

    @property
    def tokens(self) -> int:
        """Tokens of one step on one GPU."""
        return self.batch * self.sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """Something that is kept of every token in every layer."""

    name: str
    #: Bits per token of one layer.
    bits: float
    #: Whether tensor parallelism divides it even where tokens are whole on every GPU.
    is_split: bool


def layer_tensors(shape: ModelShape, setup: ActivationSetup) -> tuple[SavedTensor, ...]:
    """Return what one layer keeps of every token, in the order of the forward pass."""
    hidden = shape.hidden_size
    has_dropout = setup.dropout_bits > 0
    drop = (_saved("dropout mask", hidden * setup.dropout_bits, is_split=False),) if has_dropout else ()
    return (
        *_norm(shape, setup, "norm 1"),
        _input("q, k, v in", hidden, setup, shape.num_qkv_matrices),
        *_attention(shape, setup),
        *drop,
        *_norm(shape, setup, "norm 2"),
        *_mlp(shape, setup),
        *drop,
    )


def layer_bits(
    shape: ModelShape, setup: ActivationSetup, *, tensor_parallel: int = 1, is_sequence_parallel: bool = False
) -> float:
    """Return the bits that one layer keeps of one token on one GPU."""
    return sum(
        tensor.bits / (tensor_parallel if tensor.is_split or is_sequence_parallel else 1)
        for tensor in layer_tensors(shape, setup)
    )


def end_bits(shape: ModelShape, setup: ActivationSetup) -> float:
    """Return the bits that the last norm and the head's input keep of one token; logits are not among them."""
    norm = sum(tensor.bits for tensor in _norm(shape, setup, "last norm"))
    return norm + shape.hidden_size * setup.compute_bits  # no recipe of fewer bits is for the head


def logit_bits(setup: ActivationSetup) -> tuple[float, float]:
    """Return the bits of one logit: held for the backward pass, and more while it begins.

    Held are the logits as the head gives them and their log-softmax in fp32; the backward pass begins with the gradient
    of the latter in fp32, and of the former.
    """
    return setup.compute_bits + 32.0, 32.0 + (setup.compute_bits if setup.compute_bits != 32 else 0.0)


def _norm(shape: ModelShape, setup: ActivationSetup, name: str) -> tuple[SavedTensor, ...]:
    """The input, and a statistic or two in fp32."""
    is_rms = shape.norm == "rms"
    widened = max(setup.norm_bits, setup.stream_bits) if is_rms else setup.stream_bits
    found = [_saved(f"{name} in", shape.hidden_size * widened + (32 if is_rms else 64), is_split=False)]
    if is_rms and setup.keeps_normed:
        found.append(_saved(f"{name}, normed", shape.hidden_size * setup.stream_bits, is_split=False))
    return tuple(found)


def _attention(shape: ModelShape, setup: ActivationSetup) -> tuple[SavedTensor, ...]:
    queries = shape.num_heads * shape.head_dim
    kv = queries if setup.is_kv_repeated else shape.num_kv_heads * shape.head_dim
    bits = setup.compute_bits
    found = [_saved("q, k, v", (queries + 2 * kv) * bits)]
    if setup.attention == "fused":
        found.append(_saved("log-sum-exp", shape.num_heads * 32))
    else:
        scores = shape.num_heads * setup.sequence
        found.append(_saved("probabilities", scores * bits))
        if setup.dropout_bits:
            found.append(_saved("dropped probabilities", scores * (bits + setup.dropout_bits)))
    # A fused attention keeps its output, and the matrix behind it reads the same tensor.
    kept = setup.kept_input_bits
    if setup.attention == "fused":
        kept = bits + (kept if kept != bits else 0)
    return (*found, _saved("attention out", queries * kept))


def _mlp(shape: ModelShape, setup: ActivationSetup) -> tuple[SavedTensor, ...]:
    visited = shape.experts_per_token
    values = shape.intermediate_size * visited
    found = [
        _input("gate, up in" if shape.is_gated else "up in", shape.hidden_size * visited, setup, 1 + shape.is_gated),
        _saved("activation function", values * setup.compute_bits * setup.activation_tensors),
    ]
    if shape.is_gated:
        found.append(_saved("gate · up", 2 * values * setup.compute_bits))
    return (*found, _saved("down in", values * setup.kept_input_bits))


def _input(name: str, width: int, setup: ActivationSetup, num_matrices: int) -> SavedTensor:
    """What matrices read: whole on every GPU unless tokens are divided."""
    times = num_matrices if setup.casts else 1
    return _saved(name, times * width * setup.kept_input_bits, is_split=False)


def _saved(name: str, bits: float, *, is_split: bool = True) -> SavedTensor:
    return SavedTensor(name=name, bits=bits, is_split=is_split)
