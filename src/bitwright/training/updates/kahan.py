"""kahan: what rounding took away is kept in a second bf16 number, and given back before the next step.

    w ← fp32(p) + fp32(c)      the optimizer's step on w, decay included      p ← bf16(w), c ← bf16(w − p)

p and c together have some 16 significant bits. c is rounded to nearest itself: an update below 2⁻¹⁸ of its weight is
lost again once c is large, where stochastic rounding still takes its share of it.

optimi adds the update to c, then c to p, all in bf16, and computes the update from p alone; this is the same where no
sum is rounded, and nearer to fp32 where one is.
"""

from bitwright.training.optimizer.update import UpdateRule

UPDATES = (
    UpdateRule(
        name="kahan",
        description="what rounding took away is kept in a second bf16 number",
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 4.2; optimi",
        parameters=("fp32", "bf16"),
        is_compensated=True,
    ),
)
