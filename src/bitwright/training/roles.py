"""Roles of a model that recipes of low precision leave alone, and why.

The head's output feeds a softmax over the whole vocabulary; a router's decides which experts see a token, and a token
that is sent elsewhere is no small error; an embedding is looked up, not multiplied.
"""

from bitwright.training.policy import KeptHigh

KEPT_IN_FP8 = (
    KeptHigh(
        role="lm_head", reason="its rounding goes straight into the loss, and it is a small share of all products"
    ),
    KeptHigh(role="router", reason="rounding changes which experts a token reaches"),
    KeptHigh(role="embedding", reason="looked up, not multiplied"),
)
