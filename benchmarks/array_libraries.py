"""What one writes with the libraries of exact small floats on NumPy arrays: peers of `quantize.py`.

ml_dtypes brings dtypes: `astype` there and back. gfloat rounds arrays of NumPy or torch (`round_ndarray`, whatever its
array library); its `quantize_block` takes one block at a time, so MX is timed both with it and with the scales that
`compute_scale_amax` defines, found for all blocks at once around `round_ndarray`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import torch
from gfloat import BlockFormatInfo, FormatInfo
from torch import Tensor

_ML_DTYPES: Mapping[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}
_GFLOAT_FORMATS: Mapping[str, FormatInfo] = {
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp16": gfloat.formats.format_info_binary16,
    "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
}
_GFLOAT_BLOCKS: Mapping[str, BlockFormatInfo] = {
    "mxfp8": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp6": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
    "mxint8": gfloat.formats.format_info_mxint8,
}


def to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    """The same memory as an array; bf16 in the dtype of ml_dtypes."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def to_torch(x: Any) -> Tensor:
    """Undo `to_numpy`."""
    if isinstance(x, Tensor):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def ml_dtypes_astype(format: str, x: Tensor) -> Callable[[], Any] | None:
    """Cast there and back; None for formats that ml_dtypes has not, and where nothing is to be cast."""
    dtype = _ML_DTYPES.get(format)
    array = to_numpy(x)
    if dtype is None or array.dtype == dtype:
        return None
    return lambda: array.astype(dtype).astype(array.dtype)


def gfloat_round(format: str, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to round an array, by what it is an array of; none for formats that gfloat has not. Takes fp32."""
    info = _GFLOAT_FORMATS.get(format)
    if info is None:
        return {}
    saturates = info.num_nans == 0  # where there is neither Inf nor NaN, gfloat refuses what is too large
    array = x.numpy()
    return {
        "NumPy": lambda: gfloat.round_ndarray(info, array, sat=saturates),
        "torch": lambda: gfloat.round_ndarray(info, x, sat=saturates),
    }


def gfloat_blocks(scheme: str, x: Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to quantise and dequantise MX blocks of all rows; none for other schemes. Takes fp32."""
    info = _GFLOAT_BLOCKS.get(scheme)
    if info is None:
        return {}
    array = x.numpy()

    def with_numpy() -> Any:
        grouped = array.reshape(-1, info.k)
        amax = np.abs(grouped).max(-1, keepdims=True)
        scale = np.exp2(np.clip(np.floor(np.log2(amax)) - info.etype.emax, -127.0, 127.0))
        return (gfloat.round_ndarray(info.etype, grouped / scale, sat=True) * scale).reshape(array.shape)

    def with_torch() -> Any:
        grouped = x.view(-1, info.k)
        amax = grouped.abs().amax(-1, keepdim=True)
        scale = torch.exp2((amax.log2().floor() - info.etype.emax).clamp(-127.0, 127.0))
        return (gfloat.round_ndarray(info.etype, grouped / scale, sat=True) * scale).reshape(x.shape)

    return {"NumPy": with_numpy, "torch": with_torch}


def gfloat_quantize_block(scheme: str, x: Tensor) -> Callable[[], Any] | None:
    """gfloat's own quantiser, one block after the other; None for schemes that gfloat has not. Takes fp32."""
    info = _GFLOAT_BLOCKS.get(scheme)
    if info is None:
        return None
    blocks = x.numpy().reshape(-1, info.k)

    def scale(emax: float, values: Any) -> float:
        return float(gfloat.compute_scale_amax(emax, values))

    return lambda: np.stack([gfloat.quantize_block(info, block, scale) for block in blocks]).reshape(x.shape)
