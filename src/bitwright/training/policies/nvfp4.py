"""nvfp4: E2M1 in blocks of 16 under E4M3 scales; gradients rounded stochastically; the rest bf16-mixed.

Four bits bias a gradient unless its rounding is stochastic, and outliers of the weight gradient are spread by a
Hadamard rotation of both operands. The last layers, whose gradients are largest, stay in bf16.
"""

from bitwright.training.policy import Policy
from bitwright.training.recipes import NVFP4
from bitwright.training.roles import KEPT_IN_FP8

POLICIES = (
    Policy(
        name="nvfp4",
        description="linear layers in E2M1 in blocks of 16, stochastic gradients, rotated wgrad; the rest bf16-mixed",
        source="NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149, section 4",
        compute="bf16",
        products=NVFP4,
        kept=KEPT_IN_FP8,
        last_layers_high=0.15,
    ),
)
