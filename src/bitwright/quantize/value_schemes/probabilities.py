"""Softmax outputs in 8 bits: exp(score − max) lies in [0, 1], so that the format's largest number stands for 1.

Under that scale E4M3 resolves probabilities down to 2⁻⁹/448 = 4·10⁻⁶ of the largest, and INT8 down to 1/254: what is
smaller becomes zero. The sum of the softmax is taken before this cast, as fused kernels do.
"""

from bitwright.quantize.granularity import TENSOR
from bitwright.quantize.scheme import Scaling, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme


def _unit(number: str, source: str, in_default_search: bool = True) -> ValueScheme:
    return ValueScheme(
        name=f"{number}_unit",
        description=f"{number.upper()} probabilities, the largest number standing for 1",
        source=source,
        values=TensorScheme(format=number, scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        axis="tensor",
        static=True,
        roles=frozenset({"attn.softmax"}),
        in_default_search=in_default_search,
    )


VALUE_SCHEMES = (
    _unit("fp8_e4m3", "FlashAttention-3, arXiv:2407.08608, section 3.3; cuDNN FP8 attention"),
    _unit("fp8_e5m2", "cuDNN FP8 attention", False),
    _unit("int8", "SageAttention, arXiv:2410.02367, section 4.3 (P in INT8, static scale 1/127)", False),
)
