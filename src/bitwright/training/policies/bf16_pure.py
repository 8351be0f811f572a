"""bf16-pure: parameters in bf16 without masters, by three rules of storing an update.

bf16 has 8 significant bits: an update smaller than 2⁻⁹ of its weight is rounded away, and late in training most are.

    bf16-pure         nearest: what `model.bfloat16()` and a plain optimizer do; here to be compared with
    bf16-pure-sr      stochastic: an update that is a tenth of a step is taken every tenth time; right on average
    bf16-pure-kahan   what rounding lost is kept in a second bf16 number and added to the next update

With the latter two the optimizer computes in fp32 and its moments are kept in fp32: a second moment in bf16 does not
decay (1 − β₂ = 0.001 is below half a step of it).
"""

from dataclasses import replace

from bitwright.training.policy import Policy

_PURE = Policy(
    name="bf16-pure",
    description="everything kept in bf16, updates rounded to nearest: small ones are lost",
    source="model.bfloat16() with a plain optimizer; Lightning's bf16-true",
    aliases=("bf16-true", "bfloat16-true"),
    compute="bf16",
    parameters="bf16",
    update="nearest",
    moments="bf16",
)

POLICIES = (
    _PURE,
    replace(
        _PURE,
        name="bf16-pure-sr",
        description="bf16 parameters, updates rounded stochastically, fp32 moments, no masters",
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 4.1; torchao's optimizers",
        aliases=("bf16-sr",),
        update="stochastic",
        moments="fp32",
    ),
    replace(
        _PURE,
        name="bf16-pure-kahan",
        description="bf16 parameters with a bf16 number for what rounding lost, fp32 moments, no masters",
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192, section 4.2; optimi",
        aliases=("bf16-kahan",),
        update="kahan",
        moments="fp32",
    ),
)
