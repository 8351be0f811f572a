"""fp8-block: E4M3 everywhere, a scale per 128 inputs or gradients and per 128 × 128 weights; the rest bf16-mixed.

Small blocks bring the range that E5M2 would be needed for, so gradients keep E4M3's extra bit.
"""

from bitwright.training.policy import Policy
from bitwright.training.recipes import FP8_BLOCK
from bitwright.training.roles import KEPT_IN_FP8

POLICIES = (
    Policy(
        name="fp8-block",
        description="linear layers in E4M3 with scales per block of 128; the rest bf16-mixed",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3; Transformer Engine, Float8BlockScaling",
        compute="bf16",
        products=FP8_BLOCK,
        kept=KEPT_IN_FP8,
    ),
)
