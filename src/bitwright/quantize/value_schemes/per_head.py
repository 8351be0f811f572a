"""One scale per attention head (or per tensor), found in calibration and kept with the plan: no reduction at run time.

What goes beyond a static scale saturates, and is counted before the cast (`inference/counters.py`). Scales are amax of
all calibration tokens over the format's largest number.

Casts round to nearest, as hardware does. vLLM's kernels for CPUs drop the bits that do not fit instead: what they keep
is up to an eighth smaller than what was computed, and always smaller. No scale makes up for that, so it is a scheme of
its own, which a checkpoint says in the same words.
"""

from dataclasses import replace

from bitwright.quantize.granularity import TENSOR
from bitwright.quantize.scheme import Scaling, TensorScheme
from bitwright.quantize.value_scheme import Axis, ValueScheme

_ATTENTION = frozenset({"attn.qk", "attn.pv", "attn.output", "kv_cache"})
_CACHE = frozenset({"kv_cache"})


def _static(number: str, axis: Axis, roles: frozenset[str], source: str, in_default_search: bool = True) -> ValueScheme:
    return ValueScheme(
        name=f"{number}_{axis}",
        description=f"{number.upper()}, one static scale per {axis}, found in calibration",
        source=source,
        values=TensorScheme(format=number, scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        axis=axis,
        static=True,
        roles=roles,
        in_default_search=in_default_search,
    )


def _truncated(number: str, source: str) -> ValueScheme:
    return replace(
        _static(number, "tensor", _CACHE, source, in_default_search=False),
        name=f"{number}_tensor_truncated",
        description=f"{number.upper()}, one static scale per tensor; casts round toward zero",
        rounding="toward_zero",
    )


VALUE_SCHEMES = (
    _static("fp8_e4m3", "head", _ATTENTION, "FlashAttention-3 and vLLM: FP8 attention with descale factors per head"),
    _static("fp8_e5m2", "head", _ATTENTION, "TensorRT-LLM and vLLM: kv_cache_dtype fp8_e5m2", False),
    _static("int8", "head", _ATTENTION, "TensorRT-LLM: INT8 KV cache with static scales; here one per head"),
    _static("fp8_e4m3", "tensor", _CACHE, "vLLM: kv_cache_dtype fp8 with k_scale and v_scale of a checkpoint"),
    _static("fp8_e5m2", "tensor", _CACHE, "vLLM: kv_cache_dtype fp8_e5m2", False),
    _static("int8", "tensor", _CACHE, "TensorRT-LLM: INT8 KV cache, kv_cache_scaling_factor", False),
    _truncated("fp8_e4m3", "vLLM on CPUs, csrc/cpu/cpu_attn_fp8.hpp: float_to_fp8e4m3_scalar cuts the bits off"),
)
