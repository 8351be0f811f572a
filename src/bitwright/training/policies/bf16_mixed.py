"""bf16-mixed: products in bf16, fp32 masters. bf16 has the range of fp32, so nothing is scaled.

Bit for bit what a loop around torch.autocast does.
"""

from bitwright.training.policy import Policy

POLICIES = (
    Policy(
        name="bf16-mixed",
        description="products in bf16, fp32 masters and moments: torch.autocast, bit for bit",
        source="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322; torch.amp",
        aliases=("mixed_bfloat16", "bfloat16-mixed", "bf16", "bfloat16"),
        compute="bf16",
        preference=2,
    ),
)
