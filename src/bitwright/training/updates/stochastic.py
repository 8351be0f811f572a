"""stochastic: the fp32 result is rounded to one of its two bf16 neighbours, the nearer the likelier.

An update of a tenth of a step is taken every tenth time: the expected weight is the fp32 result, and the error of many
steps grows as the square root of their number. No memory beside the parameters. Random bits come from Philox under a
seed of the step (`optimizer/draws.py`), so that a resumed run draws what the uninterrupted one does.
"""

from bitwright.training.optimizer.update import UpdateRule

UPDATES = (
    UpdateRule(
        name="stochastic",
        description="rounded to a neighbour by chance: right on average, no further memory",
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 4.1; torchao's optimizers",
        parameters=("fp32", "bf16"),
        rounding="stochastic",
    ),
)
