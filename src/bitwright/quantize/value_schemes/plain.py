"""Values rounded to a 16-bit format without scales, at every kind of site.

At a norm its input and its output are rounded, while sums of squares and the division stay in fp32, as fused kernels
do. At the residual stream every sum is rounded. At the sum of the softmax each partial sum over a block of keys is: a
running sum in bf16 loses whatever is below 1/256 of it. Router logits choose experts, so that rounding them changes
which expert answers (`search/value_router.py`).
"""

from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.value_scheme import ValueScheme

_EVERYWHERE = frozenset(
    {
        "attn.qk",
        "attn.softmax",
        "attn.softmax_sum",
        "attn.pv",
        "attn.output",
        "kv_cache",
        "mlp.up",
        "mlp.act",
        "mlp.down",
        "norm",
        "residual",
        "router",
    }
)


def _plain(number: str, description: str, source: str) -> ValueScheme:
    return ValueScheme(
        name=f"{number}_values",
        description=description,
        source=source,
        values=TensorScheme(format=number),
        axis="tensor",
        static=False,
        roles=_EVERYWHERE,
    )


VALUE_SCHEMES = (
    _plain("bf16", "rounded to bfloat16", "bfloat16: the upper half of binary32; autocast's dtype on CPUs"),
    _plain("fp16", "rounded to half precision; overflows above 65504", "IEEE 754-2019, binary16"),
)
