"""Triton kernels: rounding to a format, on the words of fp32 numbers.

Nearest even, where steps and sums are normal fp32 numbers: with M = 2^23 · step, whose ulp is the step, c + M − M is c
rounded to a multiple of the step (Dekker 1971; see `backends/cpu/lanes.py`). Everything else is integer arithmetic: the
significand is shifted right until its last bit is worth one step, the mode looks at what fell out, and the sum is put
together again, subnormal fp32 numbers included. Neither way depends on whether a processor flushes subnormals.

What a GPU compiler may change, and how it is kept from it:

    a · b + c contracted to one rounding    `enable_fp_fusion=False` with every launch; no kernel here adds a product
    x / y approximated                      `tl.math.div_rn` (div.rn.f32 of PTX)
    subnormals flushed                      PTX instructions flush only where they say .ftz, which Triton does not write
                                            for +, ·, div_rn and comparisons
    NaN's bits                              never looked at: NaN is written as one word

Sources: Triton 3.9, `triton.language.math.div_rn` and `triton.backends.nvidia.compiler.CUDAOptions.enable_fp_fusion`;
PTX ISA, floating-point instructions. tests/quantize/test_triton.py reads the PTX that Triton writes for these kernels.

bf16 travels as int16 words: Triton's interpreter truncates when it narrows to bf16, GPUs round.
"""

# Kernels are written in Triton's language, which type checkers of Python do not know.
# mypy: ignore-errors

import triton
import triton.language as tl

#: Kernels of this process are interpreted, on CPU tensors.
RUNS_ON_CPU = triton.knobs.runtime.interpret

_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_HIDDEN = tl.constexpr(0x00800000)


@triton.jit
def to_bits(x):
    """fp32 → its word, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def to_float(bits):
    """Word → fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_fp32(pointers, mask):
    """Numbers in fp32 from fp32, fp16 or (as int16) bf16; 0 outside the mask."""
    raw = tl.load(pointers, mask=mask, other=0)
    if raw.dtype == tl.int16:
        return to_float(raw.to(tl.int32) << 16)
    else:
        return raw.to(tl.float32)


@triton.jit
def store_fp32(pointers, values, mask, is_exact: tl.constexpr):
    """Numbers into fp32, fp16 or (as int16) bf16, to nearest even. `is_exact`: each is a bf16."""
    element: tl.constexpr = pointers.dtype.scalar.element_ty
    if element == tl.int16:
        bits = to_bits(values)
        if not is_exact:
            is_nan = (bits & _MAGNITUDE) > _INF
            bits = tl.where(is_nan, _NAN, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(pointers, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, values.to(element), mask=mask)


@triton.jit
def floor_log2(word):
    """Exponent of a positive number given by its word, subnormal ones too."""
    field = word >> 23
    return tl.where(field > 0, field - 127, (to_bits(word.to(tl.float32)) >> 23) - (127 + 149))


@triton.jit
def _steps_up(rest, shift, significand, negative, random, mode: tl.constexpr, random_bits: tl.constexpr):
    """Whether the mode takes the larger neighbour; `rest` is what the shift cut off. Shifts above 30 leave rest < ½."""
    if mode == "nearest_even":
        half = (1 << tl.minimum(shift, 30)) >> 1
        return (rest > half) | ((rest == half) & (rest != 0) & ((significand & 1) != 0))
    elif mode == "nearest_away":
        half = (1 << tl.minimum(shift, 30)) >> 1
        return (rest >= half) & (rest != 0)
    elif mode == "toward_zero":
        return rest < 0
    elif mode == "up":
        return (rest != 0) & (negative == 0)
    elif mode == "down":
        return (rest != 0) & negative
    else:
        tl.static_assert(mode == "stochastic")
        # the first 32 bits of rest / 2^shift; with the random bits they carry out of 32 bits, or not
        short = rest.to(tl.uint32) << tl.minimum(tl.maximum(32 - shift, 0), 31).to(tl.uint32)
        long = rest.to(tl.uint32) >> tl.minimum(tl.maximum(shift - 32, 0), 31).to(tl.uint32)
        kept: tl.constexpr = 0xFFFFFFFF << (32 - random_bits) & 0xFFFFFFFF
        fraction = tl.where(shift <= 32, short, long) & tl.full((), kept, tl.uint32)
        total = tl.add(fraction, random & tl.full((), kept, tl.uint32), sanitize_overflow=False)
        return total < fraction


@triton.jit
def _round_magnitude(word, negative, random, grid: tl.constexpr, mode: tl.constexpr, random_bits: tl.constexpr):
    """Word of a magnitude → word of what it rounds to, as if the format had no largest number."""
    if mode == "nearest_even" and grid.is_short:
        cut = tl.minimum(word, grid.cut)
        magic = tl.maximum(cut & _INF, (grid.emin + 127) << 23) + ((23 - grid.fraction_bits) << 23)
        return to_bits((to_float(cut) + to_float(magic)) - to_float(magic))
    elif mode == "nearest_even" and grid.emin == -126:
        # the exponent field of fp32: a carry out of the fraction is the next exponent
        dropped: tl.constexpr = 23 - grid.fraction_bits
        unit: tl.constexpr = 1 << dropped
        bounded = tl.minimum(word, _INF)
        if dropped > 0:
            bounded = (bounded + ((unit >> 1) - 1) + ((bounded >> dropped) & 1)) & -unit
        return bounded
    else:
        field = word >> 23
        exponent = floor_log2(word) if grid.emin < -126 else tl.maximum(field, 1) - 127
        significand = tl.where(field > 0, (word & (_HIDDEN - 1)) | _HIDDEN, word)
        step = tl.maximum(exponent, grid.emin) - grid.fraction_bits
        shift = step + 150 - tl.maximum(field, 1)
        held = tl.minimum(shift, 30)
        whole = significand >> held
        rest = significand & ((1 << held) - 1)
        whole += _steps_up(rest, shift, whole, negative, random, mode, random_bits).to(tl.int32)
        bits = to_bits(whole.to(tl.float32)) + (step << 23)
        if grid.emin - grid.fraction_bits < -126:
            is_subnormal = (to_bits(whole.to(tl.float32)) >> 23) + step < 1
            bits = tl.where(is_subnormal, whole << tl.minimum(tl.maximum(step + 149, 0), 23), bits)
        return tl.where(whole == 0, 0, bits)


@triton.jit
def round_bits(bits, random, grid: tl.constexpr, overflow: tl.constexpr, mode: tl.constexpr, random_bits: tl.constexpr):
    """Word of an fp32 number → word of the number of a float or integer format that it becomes."""
    word = bits & _MAGNITUDE
    negative = bits < 0
    rounded = _round_magnitude(word, negative, random, grid, mode, random_bits)
    if grid.smallest > 0:
        rounded = tl.maximum(rounded, grid.smallest)
    if grid.signed and grid.largest_negative != grid.largest:  # integers, which saturate
        rounded = tl.minimum(rounded, tl.where(negative, grid.largest_negative, grid.largest))
    elif mode == "toward_zero" or overflow.beyond == grid.largest:
        rounded = tl.minimum(rounded, grid.largest)
    elif mode == "up":
        rounded = tl.where(rounded > grid.largest, tl.where(negative, grid.largest, overflow.beyond), rounded)
    elif mode == "down":
        rounded = tl.where(rounded > grid.largest, tl.where(negative, overflow.beyond, grid.largest), rounded)
    else:
        rounded = tl.where(rounded > grid.largest, overflow.beyond, rounded)
    if overflow.infinite != grid.largest:
        rounded = tl.where(word == _INF, overflow.infinite, rounded)
    if grid.signed:
        sign = bits & _SIGN
        if not grid.has_negative_zero:
            sign = tl.where(rounded == 0, 0, sign)
        rounded |= sign
    elif not overflow.drops_sign:
        is_below = (negative & (rounded != 0)) if grid.smallest == 0 else (negative | (word == 0))
        rounded = tl.where(is_below, overflow.below, rounded)
    return tl.where(word > _INF, overflow.nan, rounded)


@triton.jit
def codebook_position(x, random, table, grid: tl.constexpr, mode: tl.constexpr, random_bits: tl.constexpr):
    """Which of the ascending values x becomes; any for NaN. The table is that of `grids.table_of`."""
    length: tl.constexpr = 1 << grid.bits
    is_nearest: tl.constexpr = mode == "nearest_even" or mode == "nearest_away"
    found = tl.zeros_like(to_bits(x))
    for level in tl.static_range(grid.bits):
        half = length >> (level + 1)
        if is_nearest:
            is_above = x > tl.load(table + length + found + (half - 1))
        else:
            is_above = x >= tl.load(table + found + half)
        found += tl.where(is_above, half, 0)
    if not is_nearest:
        # found: the largest value up to x; whatever lies beyond the ends is at the end
        low = tl.load(table + found)
        upper = tl.minimum(found + 1, length - 1)
        is_value = (x <= low) | (found == length - 1)
        near, far = tl.where(x < 0, upper, found), tl.where(x < 0, found, upper)
        if mode == "toward_zero":
            chosen = near
        elif mode == "up":
            chosen = upper
        elif mode == "down":
            chosen = found
        else:
            tl.static_assert(mode == "stochastic")
            # rest = |x − near| / |far − near|, in fp64 like the reference; which half it is in, exactly
            near_value, far_value = tl.load(table + near).to(tl.float64), tl.load(table + far).to(tl.float64)
            gap = tl.where(is_value, 1.0, tl.abs(far_value - near_value))
            rest = tl.abs(x.to(tl.float64) - near_value) / gap
            middle = tl.load(table + 2 * length + found)
            is_tie = (x == middle) & (tl.load(table + 3 * length + found) != 0)
            is_beyond = (x > middle) ^ (x < 0)
            drawn = random >> (32 - random_bits)
            threshold = 1.0 - drawn.to(tl.float64) * (0.5**random_bits)
            steps_late = (threshold <= 0.5) | ((threshold < 1.0) & (rest >= threshold))
            steps_early = (threshold < 0.5) & (rest >= threshold)
            steps = tl.where(is_tie, threshold <= 0.5, tl.where(is_beyond, steps_late, steps_early))
            chosen = tl.where(steps, far, near)
        found = tl.where(is_value, found, chosen)
    return found


@triton.jit
def round_fp32(
    x,
    random,
    table,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    mode: tl.constexpr = "nearest_even",
    random_bits: tl.constexpr = 32,
):
    """fp32 → the number of the format that it becomes, fp32."""
    if grid.is_codebook:
        value = tl.load(table + codebook_position(x, random, table, grid, mode, random_bits))
        return tl.where(x == x, value, to_float(tl.full(x.shape, _NAN, tl.int32)))
    else:
        return to_float(round_bits(to_bits(x), random, grid, overflow, mode, random_bits))


# another seed is no other kernel
@triton.jit(do_not_specialize=["seed"])
def round_kernel(
    x_pointer,
    out_pointer,
    table,
    seed,
    size,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    mode: tl.constexpr,
    random_bits: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` consecutive elements a program."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    x = load_fp32(x_pointer + index, mask)
    random = tl.randint(seed, index) if mode == "stochastic" else 0
    rounded = round_fp32(x, random, table, grid, overflow, mode, random_bits)
    store_fp32(out_pointer + index, rounded, mask, grid.fits_bf16)
