"""The verbs as torch custom operators: what `torch.compile` and `torch.export` see.

    bitwright::round_values    numbers by themselves
    bitwright::fake_quantize   groups under a scale, to values
    bitwright::round_channels  … of tokens, channel by channel, as far as groups are full
    bitwright::quantize        … to codes, scales, offsets and tensor scale
    bitwright::pack            … to bits
    bitwright::unpack          bits to values

An operator is opaque to the compiler: it is called, never traced, so that a compiled or exported program runs the same
kernels and gives the same numbers. Shape functions say what comes out without running anything. Schemes travel as text
(`TensorScheme.text`), formats by name; which backend runs is decided when the operator runs, from the tensor that it
is given (`select`). What an operator does not have to give (offsets of a symmetric scheme, a tensor scale) is a tensor
without elements.

Gradients pass straight through rounding (Bengio, Léonard and Courville 2013), as quantisation-aware training has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.pack import PackedTensor, pack_codes, stored_dtype
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.scheme import TensorScheme, read_scheme
from bitwright.quantize.select import select_packing, select_rounding, select_scaled

_LIBRARY = torch.library.Library("bitwright", "DEF")
#: Schemas by name; `out` is written to.
_SCHEMAS = {
    "round_values": "(Tensor x, str format, str rounding, str overflow, int seed, int random_bits) -> Tensor",
    "round_values_out": (
        "(Tensor x, str format, str rounding, str overflow, int seed, int random_bits, Tensor(a!) out) -> ()"
    ),
    "fake_quantize": "(Tensor x, str scheme, str rounding, int seed, int random_bits) -> Tensor",
    "fake_quantize_out": "(Tensor x, str scheme, str rounding, int seed, int random_bits, Tensor(a!) out) -> ()",
    "round_channels": "(Tensor x, str scheme, str rounding) -> Tensor",
    "quantize": "(Tensor x, str scheme, str rounding, int seed, int random_bits) -> (Tensor, Tensor, Tensor, Tensor)",
    "pack": "(Tensor x, str scheme, str rounding, int seed, int random_bits) -> (Tensor, Tensor, Tensor, Tensor)",
    "unpack": (
        "(Tensor codes, Tensor scales, Tensor offsets, Tensor tensor_scale, str scheme, SymInt rows, SymInt columns, "
        "ScalarType dtype) -> Tensor"
    ),
    "unpack_out": (
        "(Tensor codes, Tensor scales, Tensor offsets, Tensor tensor_scale, str scheme, SymInt rows, SymInt columns, "
        "ScalarType dtype, Tensor(a!) out) -> ()"
    ),
}
_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


# --- what runs --------------------------------------------------------------------------------------------------------


def _round_values(
    x: Tensor, format: str, rounding: str, overflow: str, seed: int, random_bits: int, out: Tensor | None = None
) -> Tensor:
    number = formats.FORMATS[format]
    backend = select_rounding(format, x.device.type, x.dtype, rounding, overflow).module
    return backend.round_values(
        x, number, rounding=rounding, overflow=overflow, seed=_unsigned(seed), random_bits=random_bits, out=out
    )


def _round_values_out(
    x: Tensor, format: str, rounding: str, overflow: str, seed: int, random_bits: int, out: Tensor
) -> None:
    _raise_if_overlapping(x, out)
    _round_values(x, format, rounding, overflow, seed, random_bits, out)


def _fake_quantize(
    x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int, out: Tensor | None = None
) -> Tensor:
    read = read_scheme(scheme)
    x_NK = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    backend = select_scaled(read, x.device.type, x.dtype, rounding).module
    out_NK = None if out is None else out.view(x_NK.shape)
    return backend.fake_quantize(x_NK, read, out=out_NK, **_drawn(rounding, seed, random_bits)).reshape(x.shape)


def _fake_quantize_out(x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int, out: Tensor) -> None:
    _raise_if_overlapping(x, out)
    _fake_quantize(x, scheme, rounding, seed, random_bits, out)


def _round_channels(x: Tensor, scheme: str, rounding: str) -> Tensor:
    """Values [..., tokens, channels]; tokens of a group that is not full stay."""
    scaling = read_scheme(scheme).scaling
    assert scaling is not None
    n, num_tokens = scaling.granularity.group_size, x.shape[-2]
    full = num_tokens // n * n
    if full == 0:
        return x.clone()
    by_channel = x[..., :full, :].unflatten(-2, (full // n, n)).transpose(-1, -2)
    found = _fake_quantize(by_channel.contiguous(), scheme, rounding, 0, 1)
    rounded = found.transpose(-1, -2).flatten(-3, -2)
    return torch.cat([rounded, x[..., full:, :]], dim=-2)


def _quantize(x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int) -> _Parts:
    read = read_scheme(scheme)
    backend = select_scaled(read, x.device.type, x.dtype, rounding).module
    q = backend.quantize(x, read, **_drawn(rounding, seed, random_bits))
    return q.codes_NK, *_parts(x, q.scales_NG, q.offsets_NG, q.tensor_scale)


def _pack(x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int) -> _Parts:
    read = read_scheme(scheme)
    if read.scaling is None:
        number = formats.FORMATS[read.format]
        rounded = _round_values(x.float(), number.name, rounding, "ieee", seed, random_bits)
        packed = pack_codes(QTensor(scheme=read, codes_NK=rounded))
    else:
        backend = select_packing(read, x.device.type, x.dtype, rounding).module
        packed = backend.pack(x, read, **_drawn(rounding, seed, random_bits))
    return packed.codes, *_parts(x, packed.scales, packed.offsets, packed.tensor_scale)


def _unpack(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor,
    tensor_scale: Tensor,
    scheme: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    packed = packed_of((codes, scales, offsets, tensor_scale), read_scheme(scheme), rows, columns)
    if packed.scheme.scaling is None:
        values = packed.unpack(dtype)
        return values if out is None else out.copy_(values)
    return select_packing(packed.scheme, codes.device.type, dtype).module.unpack(packed, dtype, out=out)


def _unpack_out(*arguments: Any) -> None:
    _unpack(*arguments)


def _raise_if_overlapping(x: Tensor, out: Tensor) -> None:
    """`out` may be all of `x`, or none of it: what is written would be read again otherwise."""
    if x.untyped_storage().data_ptr() != out.untyped_storage().data_ptr() or not x.is_contiguous():
        return  # what is not contiguous is copied first
    first, last = sorted((x.data_ptr(), out.data_ptr()))
    if first != last and last < first + x.numel() * x.element_size():
        raise SchemeError(
            f"out begins {(last - first) // x.element_size()} elements beside x in the same memory and overlaps it; "
            "pass x itself, or memory of its own"
        )


def packed_of(parts: _Parts, scheme: TensorScheme, rows: int, columns: int) -> PackedTensor:
    """The packed matrix that the operator's tensors are."""
    codes, scales, offsets, tensor_scale = parts
    scaling = scheme.scaling
    return PackedTensor(
        scheme=scheme,
        shape=(rows, columns),
        codes=codes,
        scales=None if scaling is None else scales,
        offsets=None if scaling is None or scaling.symmetry == "symmetric" else offsets,
        tensor_scale=tensor_scale if scaling is not None and scaling.tensor_scale else None,
    )


def quantized_of(parts: _Parts, scheme: TensorScheme) -> QTensor:
    """The quantised matrix that the operator's tensors are; `scheme` has a scaling."""
    codes_NK, scales, offsets, tensor_scale = parts
    assert scheme.scaling is not None
    return QTensor(
        scheme=scheme,
        codes_NK=codes_NK,
        scales_NG=scales,
        offsets_NG=None if scheme.scaling.symmetry == "symmetric" else offsets,
        tensor_scale=tensor_scale if scheme.scaling.tensor_scale else None,
    )


def _parts(x: Tensor, *found: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    scales, offsets, tensor_scale = (x.new_empty(0, dtype=torch.float32) if part is None else part for part in found)
    return scales, offsets, tensor_scale


def _drawn(rounding: str, seed: int, random_bits: int) -> dict[str, Any]:
    """Arguments of the torch backend, which alone rounds scaled numbers otherwise than to nearest even."""
    return (
        {}
        if rounding == "nearest_even"
        else {"rounding": rounding, "seed": _unsigned(seed), "random_bits": random_bits}
    )


def signed(seed: int) -> int:
    """A seed in [0, 2^64) as the 64-bit integer that an operator takes."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _unsigned(seed: int) -> int:
    return seed % (1 << 64)


# --- shapes -----------------------------------------------------------------------------------------------------------


def _shape_like(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _shape_of_nothing(*arguments: Any) -> None:
    return None


def _shape_of_quantize(x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int) -> _Parts:
    scaling = read_scheme(scheme).scaling
    assert scaling is not None
    shape = scaling.granularity.scale_shape(*x.shape)

    def part(size: tuple[int, ...]) -> Tensor:
        return x.new_empty(size, dtype=torch.float32)

    offsets = part((0,) if scaling.symmetry == "symmetric" else shape)
    return part(tuple(x.shape)), part(shape), offsets, part(() if scaling.tensor_scale else (0,))


def _shape_of_pack(x: Tensor, scheme: str, rounding: str, seed: int, random_bits: int) -> _Parts:
    read = read_scheme(scheme)
    rows, columns = x.shape
    bits = formats.FORMATS[read.format].bits
    codes = x.new_empty((rows, (columns * bits + 7) // 8), dtype=torch.uint8)
    nothing = x.new_empty(0, dtype=torch.float32)
    if read.scaling is None:
        return codes, nothing, nothing, nothing
    shape = read.scaling.granularity.scale_shape(rows, columns)
    number = formats.FORMATS[read.scaling.scale_format]

    def stored(dtype: torch.dtype | None, num_bits: int) -> Tensor:
        if dtype is not None:
            return x.new_empty(shape, dtype=dtype)
        return x.new_empty((shape[0] * shape[1] * num_bits + 7) // 8, dtype=torch.uint8)

    scales = stored(stored_dtype(number), number.bits)
    offsets = {
        "symmetric": nothing,
        "zero_point": stored(None, bits),
        "minimum": stored(stored_dtype(number), number.bits),
    }[read.scaling.symmetry]
    return codes, scales, offsets, x.new_empty(() if read.scaling.tensor_scale else (0,), dtype=torch.float32)


def _shape_of_unpack(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor,
    tensor_scale: Tensor,
    scheme: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((rows, columns), dtype=dtype)


# --- registration -----------------------------------------------------------------------------------------------------

_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "round_values": (_round_values, _shape_like),
    "round_values_out": (_round_values_out, _shape_of_nothing),
    "fake_quantize": (_fake_quantize, _shape_like),
    "fake_quantize_out": (_fake_quantize_out, _shape_of_nothing),
    "round_channels": (_round_channels, _shape_like),
    "quantize": (_quantize, _shape_of_quantize),
    "pack": (_pack, _shape_of_pack),
    "unpack": (_unpack, _shape_of_unpack),
    "unpack_out": (_unpack_out, _shape_of_nothing),
}


def _straight_through(num_arguments: int) -> Any:
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *(None for _ in range(num_arguments - 1))

    return backward


for _name, (_run, _shape) in _OPERATORS.items():
    _LIBRARY.define(_name + _SCHEMAS[_name])
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bitwright::{_name}", _shape, lib=_LIBRARY)
torch.library.register_autograd("bitwright::round_values", _straight_through(6), lib=_LIBRARY)
torch.library.register_autograd("bitwright::fake_quantize", _straight_through(5), lib=_LIBRARY)
torch.library.register_autograd("bitwright::round_channels", _straight_through(3), lib=_LIBRARY)
