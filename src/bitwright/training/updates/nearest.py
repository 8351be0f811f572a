"""nearest: the fp32 result is rounded to the nearest bf16 number, and small updates are lost.

An update below half a step of its weight (2⁻⁹ to 2⁻⁸ of it) changes nothing, however often it comes; a second moment in
bf16 does not decay. It is what a fused optimizer makes of a bf16 model. Torch's other kernels round after every
operation, and lose more.
"""

from bitwright.training.optimizer.update import UpdateRule

UPDATES = (
    UpdateRule(
        name="nearest",
        description="rounded to nearest: updates below half a step are lost",
        source="model.bfloat16() and torch's fused optimizers",
        parameters=("fp32", "bf16"),
        moment_rounding="nearest_even",
    ),
)
