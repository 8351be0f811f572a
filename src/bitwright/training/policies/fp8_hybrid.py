"""fp8-hybrid: E4M3 for inputs and weights, E5M2 for gradients, one delayed scale a tensor; everything else bf16-mixed.

E4M3 has a bit more of precision, which the forward pass needs; gradients need E5M2's range.
"""

from bitwright.training.policy import Policy
from bitwright.training.recipes import FP8_DELAYED
from bitwright.training.roles import KEPT_IN_FP8

POLICIES = (
    Policy(
        name="fp8-hybrid",
        description="linear layers in E4M3 forward and E5M2 backward under delayed scales; the rest bf16-mixed",
        source="Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; DelayedScaling of TE",
        aliases=("fp8", "transformer-engine", "fp8-delayed"),
        compute="bf16",
        products=FP8_DELAYED,
        kept=KEPT_IN_FP8,
        preference=3,
    ),
)
