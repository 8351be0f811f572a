"""Integer codes: weight-only in groups or per channel, and INT8 for weights and activations.

Symmetric codes divide by 2^(b−1) − 1, so that round-to-nearest never clips; clip search may use the code −2^(b−1) too.
"""

from bitwright.quantize.granularity import ROW, TENSOR, group
from bitwright.quantize.scheme import Scaling, Scheme, Symmetry, TensorScheme

_WEIGHT_ONLY = "compressed-tensors pack-quantized, AWQ and GPTQ checkpoints"
_SUFFIX: dict[Symmetry, tuple[str, str, str]] = {
    "symmetric": ("", "symmetric", _WEIGHT_ONLY),
    "zero_point": ("_zp", "integer zero point", _WEIGHT_ONLY),
    "minimum": ("_min", "floating minimum", "GGUF Q4_1 (ggml block_q4_1), there with groups of 32"),
}


def _grouped(bits: int, size: int, symmetry: Symmetry) -> Scheme:
    suffix, words, source = _SUFFIX[symmetry]
    return Scheme(
        name=f"int{bits}_g{size}{suffix}",
        description=f"{bits}-bit weights in groups of {size}, {words}; activations untouched",
        source=source,
        weights=TensorScheme(
            format=f"int{bits}" if symmetry == "symmetric" else f"uint{bits}",
            scaling=Scaling(granularity=group(size), scale_format="fp16", symmetry=symmetry),
        ),
        in_default_search=bits <= 4 and (symmetry == "symmetric" or (symmetry, size) == ("minimum", 32)),
    )


_INT8_CHANNEL = TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp32"))

SCHEMES = (
    *(_grouped(4, size, symmetry) for symmetry in _SUFFIX for size in (128, 64, 32)),
    _grouped(3, 64, "symmetric"),
    *(_grouped(8, size, "symmetric") for size in (128, 64, 32)),
    Scheme(
        name="int8_w",
        description="8-bit weights, one scale per output channel; activations untouched",
        source=_WEIGHT_ONLY,
        weights=_INT8_CHANNEL,
    ),
    Scheme(
        name="int8",
        description="INT8 W8A8: weights per output channel, activations per token, found per call",
        source="compressed-tensors int-quantized (dynamic per-token activations)",
        weights=_INT8_CHANNEL,
        activations=TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp32")),
        in_default_search=False,
    ),
    Scheme(
        name="int8_static",
        description="INT8 W8A8: weights per output channel, one scale per activation tensor, found in calibration",
        source="SmoothQuant, arXiv:2211.10438, table 2 (O3: static, there with one scale per weight tensor too); "
        "compressed-tensors int-quantized (static)",
        weights=_INT8_CHANNEL,
        activations=TensorScheme(format="int8", scaling=Scaling(granularity=TENSOR, scale_format="fp32")),
        static_activations=True,
        in_default_search=False,
    ),
)
