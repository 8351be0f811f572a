"""fp16-mixed: products in fp16, fp32 masters, a loss scale that moves.

Gradients below 2⁻²⁴ are zero in fp16, and most of a language model's are that small: the loss is multiplied by a power
of two before the backward pass, and gradients are divided by it in fp32. A step whose gradients are not finite is
skipped and the scale halved. Unlike torch's, the scale has a floor, so that its inverse never leaves fp32.
"""

from bitwright.training.loss_scale import LossScaleRule
from bitwright.training.policy import Policy

POLICIES = (
    Policy(
        name="fp16-mixed",
        description="products in fp16, fp32 masters and moments, dynamic loss scale",
        source="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740; torch.amp",
        aliases=("mixed_float16", "16-mixed", "float16-mixed", "fp16", "float16"),
        compute="fp16",
        loss_scale=LossScaleRule(),
        preference=1,
    ),
)
