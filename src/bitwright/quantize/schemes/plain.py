"""Numbers stored as they are, in one format for weights and activations."""

from bitwright.quantize.scheme import Scheme, TensorScheme


def _plain(name: str, description: str, source: str) -> Scheme:
    return Scheme(
        name=name,
        description=description,
        source=source,
        weights=TensorScheme(format=name),
        activations=None if name == "fp32" else TensorScheme(format=name),
        in_default_search=name != "fp32",
    )


SCHEMES = (
    Scheme(
        name="as_loaded",
        description="the weights exactly as the checkpoint stores them; not a choice, but what a site keeps",
        source="the checkpoint",
        weights=None,
        in_default_search=False,
    ),
    _plain("fp32", "single precision, the reference of every measurement", "IEEE 754-2019, binary32"),
    _plain("fp16", "half precision weights and activations; overflows above 65504", "IEEE 754-2019, binary16"),
    _plain("bf16", "bfloat16 weights and activations", "bfloat16: the upper half of binary32"),
)
