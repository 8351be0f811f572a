"""Block formats of the tensor cores: OCP MX (32 numbers, power-of-two scales) and NVFP4 (16 numbers, E4M3 scales)."""

from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme

_MX = Scaling(granularity=group(32), scale_format="e8m0", rule="ocp_floor")
_MXFP8 = TensorScheme(format="fp8_e4m3", scaling=_MX)
_MXFP4 = TensorScheme(format="fp4_e2m1", scaling=_MX)
_NVFP4 = TensorScheme(
    format="fp4_e2m1", scaling=Scaling(granularity=group(16), scale_format="fp8_e4m3", tensor_scale=True)
)

SCHEMES = (
    Scheme(
        name="mxfp8",
        description="E4M3 weights and activations in blocks of 32 with power-of-two scales",
        source="OCP Microscaling Formats (MX) v1.0, table 1 and section 6.3",
        weights=_MXFP8,
        activations=_MXFP8,
        in_default_search=False,
    ),
    Scheme(
        name="mxfp4",
        description="E2M1 weights and activations in blocks of 32 with power-of-two scales",
        source="OCP Microscaling Formats (MX) v1.0, table 1 and section 6.3",
        weights=_MXFP4,
        activations=_MXFP4,
        in_default_search=False,
    ),
    Scheme(
        name="nvfp4",
        description="E2M1 weights and activations in blocks of 16, E4M3 block scales and one fp32 tensor scale",
        source="NVIDIA Transformer Engine, NVFP4 block scaling (scales 448 · 6 / amax)",
        weights=_NVFP4,
        activations=_NVFP4,
        in_default_search=False,
    ),
)
