"""FP8 and FP6: floating codes with one scale per output channel (weights) and per token (activations), or per block."""

from bitwright.quantize.granularity import ROW, TENSOR, Granularity, block, group
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme

_PER_ROW = Scaling(granularity=ROW, scale_format="fp32")
_FP8 = TensorScheme(format="fp8_e4m3", scaling=_PER_ROW)


def _power_of_two_fp8(granularity: Granularity) -> TensorScheme:
    return TensorScheme(
        format="fp8_e4m3", scaling=Scaling(granularity=granularity, scale_format="fp32", rule="power_of_two")
    )


SCHEMES = (
    Scheme(
        name="fp8_w",
        description="E4M3 weights, one scale per output channel; activations untouched",
        source="OCP 8-bit Floating Point Specification (OFP8) v1.0",
        weights=_FP8,
    ),
    Scheme(
        name="fp8",
        description="FP8 W8A8: E4M3 weights per output channel, E4M3 activations per token, found per call",
        source="compressed-tensors float-quantized (dynamic per-token activations); OFP8 v1.0",
        weights=_FP8,
        activations=_FP8,
        in_default_search=False,
    ),
    Scheme(
        name="fp8_static",
        description="FP8 W8A8: E4M3 weights per output channel, one E4M3 scale per activation tensor from calibration",
        source="compressed-tensors float-quantized (static activations), vLLM's fp8 checkpoints; OFP8 v1.0",
        weights=_FP8,
        activations=TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        static_activations=True,
        in_default_search=False,
    ),
    Scheme(
        name="fp8_tensor_static",
        description="FP8 W8A8: one E4M3 scale per weight tensor, and one per activation tensor from calibration",
        source="NVIDIA ModelOpt FP8_DEFAULT_CFG, TensorRT-LLM's FP8; Micikevicius et al., arXiv:2209.05433",
        weights=TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        activations=TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        static_activations=True,
        in_default_search=False,
    ),
    Scheme(
        name="fp8_block",
        description="E4M3 weights in blocks of 128 × 128, E4M3 activations in groups of 128; power-of-two fp32 scales",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3.2; NVIDIA Transformer Engine, Float8BlockScaling",
        weights=_power_of_two_fp8(block(128, 128)),
        activations=_power_of_two_fp8(group(128)),
        in_default_search=False,
    ),
    Scheme(
        name="fp6_w",
        description="E3M2 weights, one scale per output channel; activations untouched",
        source="OCP Microscaling Formats (MX) v1.0, table 4 (FP6); FP6-LLM, section 5",
        weights=TensorScheme(format="fp6_e3m2", scaling=_PER_ROW),
    ),
)
