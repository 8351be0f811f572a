"""Blocks that share a scale: OCP MX (32 numbers, power-of-two scales), NVFP4 (16 numbers, E4M3 scales), block floats.

What a block is stands in the record of its format (`formats/block_definitions`); here it is put to weights and inputs.
`_w` leaves the inputs alone. `_static` is what checkpoints of NVFP4 hold: the tensor scale of the inputs is found in
calibration, the scales of their blocks on every call.
"""

from dataclasses import replace

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


def _weights_only(name: str, description: str) -> Scheme:
    """Weights in the block format of that name; inputs as they are."""
    return replace(_blocks(name, description), name=f"{name}_w", activations=None)


SCHEMES = (
    _blocks("mxfp8", "E4M3 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxfp6", "E3M2 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxfp4", "E2M1 weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("mxint8", "8-bit integer weights and activations in blocks of 32 with power-of-two scales"),
    _blocks("nvfp4", "E2M1 weights and activations in blocks of 16, E4M3 block scales and one fp32 tensor scale"),
    _weights_only("mxfp4", "E2M1 weights in blocks of 32 with power-of-two scales; activations untouched"),
    _weights_only("nvfp4", "E2M1 weights in blocks of 16 with E4M3 scales and a tensor scale; activations untouched"),
    replace(
        _blocks("nvfp4", "NVFP4 weights and activations, whose tensor scale is found in calibration"),
        name="nvfp4_static",
        static_activations=True,
    ),
    _blocks("bfp8", "block floating point: 8 weights or activations of 8 bits share one 8-bit exponent"),
)
