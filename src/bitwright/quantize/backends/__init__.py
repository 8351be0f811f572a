"""The same arithmetic on different machines, equal bit for bit (NaN = NaN whatever its payload; −0 is not +0).

    reference   NumPy, group by group: the definition, slow
    torch       torch operations, any device: no exceptions
    cpu         Numba
    triton      NVIDIA and AMD GPUs

A backend is a module with these functions. Each `why_not_…` gives None where the backend can, else the reason in words,
which is shown to whoever asks why another one runs.

    why_not_round(number, dtype, rounding, overflow) -> str | None
    round_values(x, number, *, rounding, overflow, seed, random_bits, out) -> Tensor

        Tensors of fp32, bf16 or fp16, any shape and strides, 0-d and empty ones too; a result in the dtype of x: the
        value is found in fp32 and narrowed to nearest even. Numbers that fp32 does not hold (wide integers) are rounded
        to it. Integers and codebooks never give −0. NaN becomes what the overflow rule puts in its place; where that is
        None (saturate and ieee into formats without NaN) it stays NaN: whoever stores codes refuses it, but whoever
        looks at values shall see it. Under stochastic rounding an element draws the word of its position in the
        row-major flattened tensor, whatever its strides.

    why_not_scaled(scheme, dtype) -> str | None
    fake_quantize(x_NK, scheme, *, out) -> Tensor       values in the dtype of x
    quantize(x_NK, scheme) -> QTensor                   codes and scales, all by their fp32 values

        Matrices under a scheme with a scaling, rounded to nearest even. fp32 arithmetic in the order of `scaling.py`,
        one rounding an operation: a division is a division, and no product is fused with a sum.

            unit  = (scale · 2^element_exponent) · tensor_scale
            code  = format(x / unit), saturating; a unit of 0 divides like infinity, so that codes are ±0
            value = code · unit                                    zero_point: (code − zero point) · unit
                                                                   minimum: code · unit + minimum

        A group with NaN or Inf is NaN all through (scale, offset, codes, values), and nobody else is the worse: a
        tensor scale does not see it. Minima are never −0.

    why_not_delayed(number, dtype) -> str | None
    scale_with_amax(x, number, inv_scale, *, out) -> (values, amax)

        Tensors as those of `round_values`, under one scale that is known beforehand (`delayed_scaling.py`); inv_scale
        is an fp32 0-d tensor. The products are two, each rounded, and the reciprocal is one fp32 division; formats
        saturate, to nearest even. x is read once. The reference leaves this out: two products around its rounding.

            values = format(x · inv_scale) · (1 / inv_scale)       in the dtype of x
            amax   = max |x|                                       fp32, 0-d: NaN if x holds one; 0 if x is empty

    why_not_packed(scheme, dtype) -> str | None
    pack(x_NK, scheme) -> PackedTensor                  codes as bits, scales as stored (`quantize/pack.py`)
    unpack(packed, dtype) -> Tensor

`out` is written and returned; it has the shape and dtype of x, and may be x. Inputs are not written to otherwise.
"""
