"""NormalFloat: the 16 values that cut a standard normal distribution into pieces of about equal probability.

Zero is one of them, so that the two halves differ: 8 values from −1 to 0, 9 from 0 to 1. A block is divided by its
largest magnitude before, which makes ±1 exact.
"""

from __future__ import annotations

from bitwright.formats.types import CodebookFormat

FORMATS = (
    CodebookFormat(
        name="nf4",
        bits=4,
        values=(
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ),
        aliases=("normalfloat4", "normal_float4"),
        source="Dettmers et al., QLoRA, arXiv:2305.14314, appendix E (the fp32 values of bitsandbytes)",
        golden=(
            (0, -1.0),
            (1, -0.6961928009986877),
            (6, -0.09105003625154495),
            (7, 0.0),
            (8, 0.07958029955625534),
            (14, 0.7229568362236023),
            (15, 1.0),
        ),
    ),
)
