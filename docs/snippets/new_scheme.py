"""Six-bit floats in groups of 64: between int4_g64 and fp8_w."""

from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme

SCHEMES = (
    Scheme(
        name="fp6_g64",
        description="E2M3 weights in groups of 64; activations untouched",
        source="OCP Microscaling Formats (MX) v1.0, table 4 (FP6), with fp16 scales in place of E8M0",
        weights=TensorScheme(format="fp6_e2m3", scaling=Scaling(granularity=group(64), scale_format="fp16")),
    ),
)
