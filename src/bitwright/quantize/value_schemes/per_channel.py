"""Keys with one scale per channel over a group of tokens, as KIVI stores them (arXiv:2402.02750, section 3).

A few channels of K are large at every token. A scale per token is set by them and resolves nothing else; a scale per
channel gives each channel its own range. Tokens of a group that is not yet full are kept as they are; here the tokens
of a full group are seen rounded by every query, those inside the group too, as a prefill sees them.
"""

from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, TensorScheme
from bitwright.quantize.value_scheme import ValueScheme


def _keys(bits: int, tokens: int) -> ValueScheme:
    return ValueScheme(
        name=f"int{bits}_channel_g{tokens}",
        description=f"{bits}-bit keys, one scale and minimum per channel over {tokens} tokens",
        source="KIVI, arXiv:2402.02750, section 3 (keys)",
        values=TensorScheme(
            format=f"uint{bits}",
            scaling=Scaling(granularity=group(tokens), scale_format="fp16", symmetry="minimum"),
        ),
        axis="channel",
        static=False,
        roles=frozenset({"kv_cache"}),
        parts=frozenset({"k_cache"}),
    )


VALUE_SCHEMES = (_keys(8, 32), _keys(4, 32))
