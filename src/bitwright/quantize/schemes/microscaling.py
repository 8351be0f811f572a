"""Blocks that share a scale: OCP MX (32 numbers, power-of-two scales), NVFP4 (16 numbers, E4M3 scales), block floats.

What a block is stands in the record of its format (`formats/block_definitions`); here it is put to weights and inputs.
"""

from bitwright import formats
from bitwright.quantize.scheme import Scheme, block_scheme


def _blocks(name: str, description: str) -> Scheme:
    """Weights and activations alike in the block format of that name."""
    tensor = block_scheme(name)
    return Scheme(
        name=name,
        description=description,
        source=formats.BLOCK_FORMATS[name].source,
        weights=tensor,
        activations=tensor,
        in_default_search=False,
    )


SCHEMES = (
    _blocks("mxfp8", "E4M3 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxfp6", "E3M2 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxfp4", "E2M1 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxint8", "8-bit integer weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("nvfp4", "E2M1 weights and activations in blocks of 16, E4M3 block scales and one fp32 tensor scale"),
    _blocks("bfp8", "block floating point: 8 weights or activations of 8 bits share one 8-bit exponent"),
)
