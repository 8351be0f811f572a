"""tf32: fp32 everywhere, but products read 10 fraction bits of their operands; sums stay fp32.

A setting of the matrix unit, not a dtype: range, memory and bandwidth are those of fp32.
"""

from bitwright.training.policy import Policy

POLICIES = (
    Policy(
        name="tf32",
        description="fp32 with products on 10 fraction bits, where the matrix unit has them",
        source="NVIDIA A100 Tensor Core GPU Architecture, 2020: TF32, 8 exponent bits, 10 fraction bits, fp32 sums",
        aliases=("tensorfloat-32", "tensorfloat32"),
        compute="tf32",
    ),
)
