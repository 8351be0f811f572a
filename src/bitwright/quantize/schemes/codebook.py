"""NF4: sixteen values placed at the quantiles of a Gaussian, weight-only, one absmax scale per 64 weights."""

from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme

SCHEMES = (
    Scheme(
        name="nf4_g64",
        description="NF4 weights in groups of 64, fp32 absmax scales; activations untouched",
        source="Dettmers et al., QLoRA, arXiv:2305.14314, section 3 (NF4 in blocks of 64, without double quantisation)",
        weights=TensorScheme(format="nf4", scaling=Scaling(granularity=group(64), scale_format="fp32")),
        in_default_search=False,
    ),
)
