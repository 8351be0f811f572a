"""fp32: parameters are fp32 and nothing is rounded but by the optimizer itself.

With fp32 moments a step is `optimizer.step()` and nothing else, whatever the optimizer is.
"""

from bitwright.training.optimizer.update import UpdateRule

UPDATES = (
    UpdateRule(
        name="fp32",
        description="fp32 parameters: the optimizer's own step",
        source="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1 (master weights)",
        parameters=("fp32",),
    ),
)
