"""fp32: every product, sum and state in single precision; the reference of every comparison."""

from bitwright.training.policy import Policy

POLICIES = (
    Policy(
        name="fp32",
        description="single precision everywhere: the reference",
        source="IEEE 754-2019, binary32",
        aliases=("float32", "32-true", "32"),
        compute="fp32",
        preference=0,
    ),
)
