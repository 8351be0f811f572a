"""One quantised matrix of a checkpoint, in the terms of this program: codes, scales, offsets, and what its input gets.

Every kind of checkpoint has its own names and layouts (`sources/`); what they hold is the same few facts. These are the
steps that several share: words of 32 bits to codes, dtypes of scales to formats, the scheme of a set of facts.

    values = (codes − zero points) · scales        or codes · scales + minima

are the checkpoint's own numbers: nothing is rounded here. Libraries multiply in 16 bits and round that product once.

Legend: N rows (out_features), K columns (in_features), R × G scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import ModelError
from bitwright.models.loaded import DTYPE_FORMATS
from bitwright.quantize import SCHEMES, QTensor
from bitwright.quantize.granularity import Granularity
from bitwright.quantize.pack import unpack_bits
from bitwright.quantize.scheme import Scaling, Scheme, Symmetry, TensorScheme
from bitwright.quantize.spelled_scheme import spell_scheme

#: torch dtype → format of scales.
SCALE_FORMATS = {**DTYPE_FORMATS, torch.float8_e8m0fnu: "e8m0"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredMatrix:
    """What a checkpoint holds of one linear layer."""

    #: Code values, scales and offsets, fp32 [N, K].
    q: QTensor
    #: What the input is rounded to; None leaves it alone.
    activations: TensorScheme | None = None
    #: fp32 0-d: the one scale of the inputs, where the checkpoint keeps one.
    input_scale: Tensor | None = None
    #: Bytes that the checkpoint takes for it.
    stored_bytes: int
    #: What the checkpoint calls it: "int4, groups of 128, symmetric".
    words: str

    @property
    def scheme(self) -> Scheme:
        """The preset with these facts, else the facts spelled out."""
        return scheme_of(self.q.scheme, self.activations, static=self.input_scale is not None)

    def cut(self, first: int, last: int) -> StoredMatrix:
        """The rows [first, last) alone.

        Raises:
            ModelError: a block of rows lies on both sides.
        """
        q, scaling = self.q, self.q.scheme.scaling
        assert scaling is not None and q.scales_NG is not None
        num_rows = q.codes_NK.shape[0]
        height = scaling.granularity.group_rows(num_rows)
        if q.scales_NG.shape[0] == 1:
            rows = slice(None)
        elif first % height == 0 and (last % height == 0 or last == num_rows):
            rows = slice(first // height, -(-last // height))
        else:
            raise ModelError(f"rows {first} to {last} of it are cut out of blocks of {height} rows")
        cut = replace(
            q,
            codes_NK=q.codes_NK[first:last],
            scales_NG=q.scales_NG[rows],
            offsets_NG=None if q.offsets_NG is None else q.offsets_NG[rows],
        )
        return replace(self, q=cut, stored_bytes=self.stored_bytes * (last - first) // num_rows)


def scheme_of(weights: TensorScheme, activations: TensorScheme | None, *, static: bool) -> Scheme:
    """The preset that stores weights so and rounds inputs so, however it finds the scales of weights; else spelled."""
    spelled = spell_scheme(weights, activations, static=static)
    for scheme in SCHEMES.values():
        if scheme.weights is None or (scheme.activations, scheme.static_activations) != (activations, static):
            continue
        if spell_scheme(scheme.weights, activations, static=static) == spelled and not _has_exponent(scheme.weights):
            return scheme
    return SCHEMES[spelled]


def _has_exponent(weights: TensorScheme) -> bool:
    return weights.scaling is not None and weights.scaling.element_exponent != 0


def tensor_scheme(
    number: str,
    granularity: Granularity,
    scale_dtype: torch.dtype,
    *,
    symmetry: Symmetry = "symmetric",
    tensor_scale: bool = False,
) -> TensorScheme:
    """The scheme of codes in a format under stored scales.

    Raises:
        ModelError: codes or scales of a kind that no format is.
    """
    if scale_dtype not in SCALE_FORMATS or number not in formats.FORMATS:
        what = f"codes in {number}" if number not in formats.FORMATS else f"scales in {scale_dtype}"
        raise ModelError(f"it has {what}, which no number format here is")
    scale_format = SCALE_FORMATS[scale_dtype]
    return TensorScheme(
        format=number,
        scaling=Scaling(
            granularity=granularity,
            scale_format=scale_format,
            rule="ocp_floor" if scale_format == "e8m0" else "amax",
            symmetry=symmetry,
            tensor_scale=tensor_scale,
        ),
    )


def input_scheme(number: str, granularity: Granularity) -> TensorScheme:
    """Inputs in a format under fp32 scales."""
    return TensorScheme(format=number, scaling=Scaling(granularity=granularity, scale_format="fp32"))


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Codes of rows of 32-bit words, lowest bits first: int32 [N, W] → int32 [N, K], 0 … 2^bits − 1."""
    return unpack_bits(words.contiguous().view(torch.uint8), bits, columns)


def integer_codes(
    codes_NK: Tensor, zeros_NG: Tensor, scales_NG: Tensor, bits: int, granularity: Granularity
) -> QTensor:
    """Unsigned codes under zero points [N, G]; symmetric ones, where every zero point is the middle of the range.

    Raises:
        ModelError: a zero point lies outside the codes.
    """
    middle = 1 << (bits - 1)
    if int(zeros_NG.min()) < 0 or int(zeros_NG.max()) >= 2 * middle:
        outside = int(zeros_NG.max()) if int(zeros_NG.max()) >= 2 * middle else int(zeros_NG.min())
        raise ModelError(f"it has a zero point of {outside}, beyond codes of 0 to {2 * middle - 1}")
    is_symmetric = bool((zeros_NG == middle).all())
    symmetry: Symmetry = "symmetric" if is_symmetric else "zero_point"
    scheme = tensor_scheme(
        f"int{bits}" if is_symmetric else f"uint{bits}", granularity, scales_NG.dtype, symmetry=symmetry
    )
    return QTensor(
        scheme=scheme,
        codes_NK=(codes_NK - middle if is_symmetric else codes_NK).float(),
        scales_NG=scales_NG.float(),
        offsets_NG=None if is_symmetric else zeros_NG.float(),
        follows_from_scales=False,
    )


def raise_unless_shape(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless a stored tensor has the shape that it must have."""
    if tuple(tensor.shape) != shape:
        raise ModelError(f"its {what} have shape {list(tensor.shape)} instead of {list(shape)}")
