"""One product with packed weights on a GPU: which kernel, and the call.

One token is multiplied where its words are read (`multiply_kernel`); more of them by matrix units (`product_kernel`).
Parts of a sum that programs shared are added in order (`add_kernel`).

x of 16 bits goes into matrix units as it is, where its dtype holds the codes too; otherwise both are taken apart into
numbers of bf16 that add up to them: two of fp16, three of fp32.

Legend: M tokens, N rows and K columns of the weight, S parts of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.formats import Format
from bitwright.quantize.backends.triton import launch, matmul_call
from bitwright.quantize.backends.triton.matmul_call import Call, Split, split_of
from bitwright.quantize.backends.triton.matmul_numbers import fits, num_parts, number_of, values_of

#: Of many tokens, twice the warps share the sums; two stages fit into the shared memory of every GPU since 8.0.
_WARPS, _WARPS_OF_MANY, _STAGES = 4, 8, 2
#: bf16 numbers that add up to one of x.
_X_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def multiply(x_MK: Tensor, call: Call, parts: Mapping[str, Tensor]) -> Tensor:
    """x Wᵀ, [M, N] in the dtype of x (fp32, bf16 or fp16).

    Raises:
        SchemeError, MissingExtra: x is on a CPU and kernels are not interpreted; no Triton.
    """
    launch.raise_if(launch.why_not_run(x_MK.dtype), x_MK)
    num_tokens, rows = x_MK.shape[0], call.chunks.rows
    y_MN = torch.empty(num_tokens, rows, dtype=x_MK.dtype, device=x_MK.device)
    if num_tokens == 0:
        return y_MN
    split = split_of(call, num_tokens)
    is_whole = split.num_parts == 1
    out = y_MN
    if not is_whole:
        out = torch.empty(split.num_parts, num_tokens, rows, dtype=torch.float32, device=x_MK.device)
    x = x_MK.detach().contiguous()
    arrays = (launch.words(x), *_arrays(call, parts, x.device), parts.get("tensor_scale"), launch.words(out))
    if num_tokens == 1:
        _multiply_one(arrays, call, split, is_whole, x)
    else:
        _multiply_many(arrays, call, split, is_whole, x)
    if not is_whole:
        from bitwright.quantize.backends.triton.matmul_kernels import add_kernel

        size = num_tokens * rows
        arguments = (out, parts.get("tensor_scale"), launch.words(y_MN), size, split.num_parts)
        run(add_kernel, (-(-size // 256),), arguments, (256,), x)
    return y_MN


def _multiply_one(arrays: tuple[Any, ...], call: Call, split: Split, is_whole: bool, x: Tensor) -> None:
    from bitwright.quantize.backends.triton.matmul_kernels import multiply_kernel

    chunks = call.chunks
    sizes = (
        *(chunks.rows, chunks.columns, chunks.num_lanes // call.chunk.step, call.num_groups),
        *(split.num_pieces, split.pieces_per_part),
    )
    constants = (number_of(call.number), call.chunk, call.scaling, is_whole, matmul_call.ROWS, call.tile_lanes)
    run(multiply_kernel, (split.row_programs, split.num_parts), (*arrays, *sizes), constants, x)


def _multiply_many(arrays: tuple[Any, ...], call: Call, split: Split, is_whole: bool, x: Tensor) -> None:
    from bitwright.quantize.backends.triton.matmul_kernels import product_kernel

    chunks = call.chunks
    sizes = (
        x.shape[0],
        chunks.rows,
        chunks.columns,
        chunks.row_words,
        call.num_groups,
        split.num_pieces,
        split.pieces_per_part,
    )
    element, x_parts, w_parts = operands_of(call.number, x.dtype)
    constants = (
        *(number_of(call.number), call.chunk, call.scaling, is_whole, call.segment_columns),
        *(_triton_type(element), x_parts, w_parts),
        *(split.tokens, matmul_call.PRODUCT_ROWS, call.product_columns),
    )
    programs = (split.row_programs, split.token_programs, split.num_parts)
    run(
        product_kernel,
        programs,
        (*arrays, *sizes),
        constants,
        x,
        _WARPS_OF_MANY if split.tokens == matmul_call.TOKENS[-1] else _WARPS,
    )


def operands_of(number: Format, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
    """What matrix units multiply: a dtype, and how many of its numbers add up to one of x and to a code."""
    if dtype != torch.float32 and fits(number, dtype):
        return dtype, 1, 1
    return torch.bfloat16, _X_PARTS[dtype], num_parts(number)


def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _arrays(call: Call, parts: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor | None, ...]:
    """Codes, scales and offsets as kernels take them, each with the values of what is looked up."""
    found: list[Tensor | None] = [parts["codes"], values_of(call.number, device)]
    for name, number, decoded in (
        ("scales", call.scale_number, call.scaling.scales),
        ("offsets", call.offset_number, call.scaling.offsets),
    ):
        stored = parts.get(name)
        if stored is None or number is None:
            found += [None, None]
        elif decoded is None:
            found += [launch.words(stored), None]
        else:
            found += [stored.view(torch.uint8).reshape(-1), values_of(number, device)]
    return tuple(found)


def run(
    kernel: Any,
    programs: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    x: Tensor,
    num_warps: int = _WARPS,
) -> None:
    """Run a kernel on the device of `x`; products and sums may be contracted."""
    settings = {"num_warps": num_warps, "num_stages": _STAGES, "enable_fp_fusion": True}
    # the interpreter computes with NumPy, which would warn of infinities
    with torch.cuda.device_of(x), np.errstate(all="ignore"):
        kernel[programs](*arguments, *constants, **settings)
