"""The recipes of products that training libraries have.

    FP8_DELAYED   E4M3 forward, E5M2 gradients, one scale a tensor from the amaxes of 1024 steps     Transformer Engine
    FP8_CURRENT   the same with scales found on the tensor itself                                    Transformer Engine
    FP8_BLOCK     E4M3; x and g in groups of 128, W in blocks of 128 × 128, powers of two            DeepSeek-V3, TE
    MXFP8         E4M3 in groups of 32 under powers of two, rounded up                               TE, torchao
    NVFP4         E2M1 in groups of 16 (W: blocks of 16 × 16) under E4M3 scales and a tensor scale; gradients rounded
                  stochastically; operands of wgrad rotated in 16s                                   TE, NVIDIA

Sources: Transformer Engine, `common/recipe`: DelayedScaling, Float8CurrentScaling, Float8BlockScaling,
MXFP8BlockScaling, NVFP4BlockScaling. P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
DeepSeek-V3, arXiv:2412.19437, section 3.3. NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149,
section 4.

MX scales are rounded up: under the floor of OCP's specification the largest number of every sixth block of a Gaussian
tensor saturates.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.quantize.granularity import TENSOR, Granularity, block, group
from bitwright.quantize.scheme import Scaling, TensorScheme, block_scheme
from bitwright.training.product_recipe import Delay, OperandRule, ProductRecipe


def _per_tensor(format: str, delay: Delay | None) -> OperandRule:
    scheme = TensorScheme(format=format, scaling=Scaling(granularity=TENSOR, scale_format="fp32"))
    return OperandRule(scheme=scheme, delay=delay)


def fp8_hybrid(delay: Delay | None) -> ProductRecipe:
    """E4M3 for x and W, E5M2 for gradients, one scale a tensor: delayed, or current (None)."""
    forward = _per_tensor("fp8_e4m3", delay)
    return ProductRecipe(forward_x=forward, forward_w=forward, dgrad_g=_per_tensor("fp8_e5m2", delay))


def _fp8_block(granularity: Granularity) -> OperandRule:
    scaling = Scaling(granularity=granularity, scale_format="fp32", rule="power_of_two")
    return OperandRule(scheme=TensorScheme(format="fp8_e4m3", scaling=scaling))


def _block(name: str, **changes: object) -> OperandRule:
    """A block format, with changes to its scaling."""
    scheme = block_scheme(name)
    assert scheme.scaling is not None
    return OperandRule(scheme=replace(scheme, scaling=replace(scheme.scaling, **changes)))  # type: ignore[arg-type]


def _nvfp4() -> ProductRecipe:
    rows, squares = _block("nvfp4"), _block("nvfp4", granularity=block(16, 16))
    gradients = replace(rows, rounding="stochastic")
    return ProductRecipe(
        forward_x=rows,
        forward_w=squares,
        dgrad_g=gradients,
        wgrad_g=replace(gradients, rotation=16),
        wgrad_x=replace(rows, rotation=16),
    )


FP8_DELAYED = fp8_hybrid(Delay())
FP8_CURRENT = fp8_hybrid(None)
FP8_BLOCK = ProductRecipe(
    forward_x=_fp8_block(group(128)), forward_w=_fp8_block(block(128, 128)), dgrad_g=_fp8_block(group(128))
)
_MX = _block("mxfp8", rule="round_up")
MXFP8 = ProductRecipe(forward_x=_MX, forward_w=_MX, dgrad_g=_MX)
NVFP4 = _nvfp4()
