"""One scale per token (and head), found when the value is computed or written: nothing to calibrate, no overflow.

Keys and queries are multiplied along head_dim, so their scales leave the product as factors. In p·v the sum runs over
tokens: a scale per token of v has to be multiplied into p or into v first, which is what kernels over a cache do that
widen it on the way in. Values of KIVI (arXiv:2402.02750) are stored so, in groups of 32 channels with a minimum.
"""

from bitwright.quantize.granularity import ROW, Granularity, group
from bitwright.quantize.scheme import Scaling, Symmetry, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

_PRODUCTS = frozenset({"attn.qk", "attn.pv", "attn.output"})
_MLP = frozenset({"mlp.up", "mlp.act", "mlp.down"})
_CACHE = frozenset({"kv_cache"})


def _per_token(
    name: str,
    number: str,
    description: str,
    source: str,
    roles: frozenset[str],
    *,
    granularity: Granularity = ROW,
    scale_format: str = "fp32",
    symmetry: Symmetry = "symmetric",
) -> ValueScheme:
    return ValueScheme(
        name=name,
        description=description,
        source=source,
        values=TensorScheme(
            format=number, scaling=Scaling(granularity=granularity, scale_format=scale_format, symmetry=symmetry)
        ),
        axis="token",
        static=False,
        roles=roles,
    )


VALUE_SCHEMES = (
    _per_token(
        "fp8_e4m3_token",
        "fp8_e4m3",
        "E4M3, one scale per token and head, found per call",
        "vLLM and TensorRT-LLM: dynamic per-token FP8",
        _PRODUCTS | _MLP | _CACHE,
    ),
    _per_token(
        "int8_token",
        "int8",
        "INT8, one scale per token and head, found per call",
        "SageAttention, arXiv:2410.02367, section 4 (q and k, there per block of tokens)",
        _PRODUCTS | _MLP | _CACHE,
    ),
    _per_token(
        "int8_token_g32",
        "int8",
        "INT8 cache in groups of 32 channels of a token",
        "llama.cpp, cache type q8_0",
        _CACHE,
        granularity=group(32),
        scale_format="fp16",
    ),
    _per_token(
        "int4_token_g32",
        "uint4",
        "4-bit cache in groups of 32 channels of a token, floating minimum",
        "KIVI, arXiv:2402.02750, section 3 (values); llama.cpp, cache type q4_1",
        _CACHE,
        granularity=group(32),
        scale_format="fp16",
        symmetry="minimum",
    ),
    _per_token(
        "int4_token",
        "uint4",
        "4-bit cache, one scale and minimum per token and head",
        "LMDeploy, online KV cache quantisation (asymmetric, per head and token; quant_policy 4)",
        _CACHE,
        scale_format="fp16",
        symmetry="minimum",
    ),
)
