"""mxfp8: E4M3 in blocks of 32 under a power of two, for all operands; the rest bf16-mixed."""

from bitwright.training.policy import Policy
from bitwright.training.recipes import MXFP8
from bitwright.training.roles import KEPT_IN_FP8

POLICIES = (
    Policy(
        name="mxfp8",
        description="linear layers in E4M3 in blocks of 32 with power-of-two scales; the rest bf16-mixed",
        source="Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv:2506.08027; OCP MX v1.0",
        compute="bf16",
        products=MXFP8,
        kept=KEPT_IN_FP8,
        preference=4,
    ),
)
